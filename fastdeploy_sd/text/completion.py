"""Collects the deltas of one sequence into the finished completion; shared by the server and LLM."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.text.output_processor import TextDelta
from fastdeploy_sd.types import DraftLogprob, FinishReason, RequestMetrics, TokenLogprob


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence.

    Attributes:
        index: which of the request's n sequences.
        token_ids: including the token that ended it (EOS, stop token, or the last one of a stop string).
        text_offsets: per token, where its text starts in the generated text, in characters.
        logprobs: one per token when asked for, else None.
        draft_logprobs, draft_text_offsets: every draft verified for these tokens when asked for, else None and
            (); see TextDelta.
        stop_reason: the stop string or stop token id that ended it, None otherwise.
        num_cached_tokens: prompt tokens taken from the prefix cache.
    """

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
        )
