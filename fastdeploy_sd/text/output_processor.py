"""RequestOutput -> text, for one sequence: detokenization, what ends the text, and the reason it ended.

The same for the server and LLM. It works token by token, so results do not depend on how many of them a step produced.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.errors import ERROR_TYPES, BadRequest, InternalError
from fastdeploy_sd.text.answer_parser import AnswerParser
from fastdeploy_sd.text.detokenizer import create_detokenizer
from fastdeploy_sd.text.line_limits import LineCutter, LineLimits
from fastdeploy_sd.text.stop_strings import LINE_LIMIT, REPEATED_CALL, StopMatch, StopStrings
from fastdeploy_sd.text.token_sources import StepText, step_texts
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import (
    F32,
    DraftLogprob,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one RequestOutput added to a sequence; text may come later than its tokens, which end with the ending one.

    Offsets are characters of the generated text, before any stop cut; those of drafts after the last token are its end.
    `token_sources`: of the step, none where it added no token; None = not asked for.
    `needs_abort` says that the engine does not know of the end; times that it did not report are 0.0.
    """

    text: str
    token_ids: tuple[int, ...]
    text_offsets: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    draft_logprobs: tuple[DraftLogprob, ...] | None = None
    draft_text_offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    needs_abort: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_sources: tuple[StepText, ...] | None = None
    embedding: F32 | None = None


@dataclass(slots=True)
class _Taken:
    """Tokens of an output, up to the last one of what ends the text.

    Attributes:
        pieces: text to show now.
        texts, offsets: the text of each token, shown or held back, and where it starts.
        match: what ended the text.
    """

    pieces: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    match: StopMatch | None = None


class OutputProcessor:
    """State of one sequence from its first to its last output, which continues the text that was shown elsewhere.

    Raises BadRequest where what ends a text is complete in that text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        shown_ids: Collection[int] = (),
        parser: AnswerParser | None = None,
        line_limits: LineLimits | None = None,
    ) -> None:
        """Begin a sequence; `shown_ids` are hidden tokens with text in it, and the end of `parser` is its end."""
        params = request.sampling
        self._request = request
        self._parser = parser
        self._detokenizer = create_detokenizer(tokenizer, [int(i) for i in request.prompt_token_ids[-16:]], shown_ids)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._lines = None if line_limits is None else LineCutter(line_limits)
        self._num_tokens = 0
        self._num_chars = 0
        self._first_token_time = 0.0
        self.shown_text, self.shown_offsets = self._skip(request.output_token_ids.tolist())

    def _skip(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        taken = self._take_tokens(RequestOutput(self._request.request_id, tuple(token_ids)))
        if taken.match is not None:
            raise BadRequest(
                "output_token_ids: expected tokens that have not ended the request, got those of"
                f" {taken.match.described}",
                param="output_token_ids",
            )
        return "".join(taken.pieces), taken.offsets

    def process(self, output: RequestOutput) -> TextDelta:
        """Return what `output` adds, nothing after a finish_reason; raises the FdsdError that the output carries."""
        if output.finish_reason is FinishReason.ERROR:
            kind, text = output.error or (InternalError.__name__, "the request failed")
            raise ERROR_TYPES.get(kind, InternalError)(text)
        if output.token_ids and not self._first_token_time:
            self._first_token_time = time.time()
        taken = self._take_tokens(output)
        pieces, offsets, match = taken.pieces, taken.offsets, taken.match
        if match is None and output.finish_reason is not None:
            held, rest = self._stops.finish(), self._detokenizer.finish()
            pieces.append(self._cut(held + rest)[0])
            taken.texts.append(rest)
        num_kept = len(offsets)
        is_cut = match is not None
        is_last = is_cut or output.finish_reason is not None
        drafts = _kept_drafts(output, num_kept, is_last)
        return TextDelta(
            text="".join(pieces),
            token_ids=output.token_ids[:num_kept],
            text_offsets=tuple(offsets),
            logprobs=None if output.logprobs is None else output.logprobs[:num_kept],
            draft_logprobs=drafts,
            draft_text_offsets=tuple((*offsets, self._num_chars)[min(d.position, num_kept)] for d in drafts or ()),
            finish_reason=match.finish_reason if match is not None else output.finish_reason,
            stop_reason=match.stop if match is not None else output.stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            needs_abort=is_cut and output.finish_reason is None,
            metrics=self._metrics(output) if is_last else None,
            prompt_logprobs=output.prompt_logprobs,
            token_sources=None if output.sources is None else step_texts(output.sources, taken.texts, num_kept),
            embedding=output.embedding,
        )

    def _take_tokens(self, output: RequestOutput) -> _Taken:
        """Take tokens up to the last one of what ends the text."""
        taken = _Taken()
        pieces, offsets = taken.pieces, taken.offsets
        params = self._request.sampling
        is_stop = output.finish_reason is FinishReason.STOP
        for i, token_id in enumerate(output.token_ids):
            self._num_tokens += 1
            offsets.append(self._num_chars)
            # The token that stopped the engine is a sign, not text, unless the user wants to see what stopped it.
            is_sign = is_stop and i == len(output.token_ids) - 1 and not params.include_stop_str_in_output
            text = "" if is_sign else self._detokenizer.push(token_id)
            taken.texts.append(text)
            self._num_chars += len(text)
            can_match = self._num_tokens >= params.min_tokens
            piece, match = self._stops.push(text, can_match=can_match)
            piece, is_cut = self._cut(piece, can_match=can_match)
            match = LINE_LIMIT if is_cut else match
            pieces.append(piece)
            if match is None and self._is_over_with(piece) and can_match:
                match = REPEATED_CALL
            if match is not None:
                taken.match = match
                break
        return taken

    def _cut(self, text: str, *, can_match: bool = True) -> tuple[str, bool]:
        """Return the part of a text that belongs to lines within the limits, and whether the rest is cut off."""
        if self._lines is None:
            return text, False
        elapsed_ms = (time.time() - self._first_token_time) * 1000 if self._first_token_time else 0.0
        end = self._lines.end_in(text, elapsed_ms, can_end=can_match)
        return text[:end], end is not None

    def _is_over_with(self, text: str) -> bool:
        if self._parser is None:
            return False
        self._parser.push(text)
        return self._parser.is_over

    def _metrics(self, output: RequestOutput) -> RequestMetrics:
        """The engine's, or this side's clock when the text ended the sequence before the engine did."""
        if output.metrics is not None:
            return output.metrics
        return RequestMetrics(self._request.arrival_time, 0.0, self._first_token_time, time.time())


def _kept_drafts(output: RequestOutput, num_kept: int, is_last: bool) -> tuple[DraftLogprob, ...] | None:
    """The drafts of a step of which `num_kept` tokens remain; draft i was verified at token i."""
    drafts = output.draft_logprobs
    if drafts is None or not is_last:
        return drafts
    return tuple(draft for draft in drafts if draft.position < num_kept)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence, `index` of the request's n; its tokens end with the one that ended it, see TextDelta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    text_offsets: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_cached_tokens: int
    metrics: RequestMetrics | None
    draft_logprobs: tuple[DraftLogprob, ...] | None = None
    draft_text_offsets: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    token_sources: tuple[StepText, ...] | None = None
    embedding: F32 | None = None


class CompletionCollector:
    """Deltas so far; linear in their total length."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._deltas: list[TextDelta] = []

    def add(self, delta: TextDelta) -> None:
        """Take the next delta."""
        self._deltas.append(delta)

    def build(self) -> Completion:
        """Return the completion; only valid once finished."""
        last = self._deltas[-1]
        assert last.finish_reason is not None, "a completion is built before its sequence has ended"
        has_logprobs = any(d.logprobs is not None for d in self._deltas)
        has_sources = any(d.token_sources is not None for d in self._deltas)
        has_drafts = any(d.draft_logprobs is not None for d in self._deltas)
        return Completion(
            index=self._index,
            text="".join(d.text for d in self._deltas),
            token_ids=tuple(i for d in self._deltas for i in d.token_ids),
            text_offsets=tuple(i for d in self._deltas for i in d.text_offsets),
            logprobs=tuple(x for d in self._deltas for x in d.logprobs or ()) if has_logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached_tokens=max(d.num_cached_tokens for d in self._deltas),
            metrics=last.metrics,
            draft_logprobs=tuple(x for d in self._deltas for x in d.draft_logprobs or ()) if has_drafts else None,
            draft_text_offsets=tuple(i for d in self._deltas for i in d.draft_text_offsets),
            prompt_logprobs=next((d.prompt_logprobs for d in self._deltas if d.prompt_logprobs is not None), None),
            token_sources=tuple(x for d in self._deltas for x in d.token_sources or ()) if has_sources else None,
            embedding=next((d.embedding for d in self._deltas if d.embedding is not None), None),
        )
