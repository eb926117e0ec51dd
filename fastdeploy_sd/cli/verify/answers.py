"""What requests got, and the first place where two sets of answers differ. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from fastdeploy_sd.rules.sampling import MAX_LOGPROBS
from fastdeploy_sd.types import FinishReason, PromptLogprobs, RequestId, RequestOutput, TokenLogprob


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything a request got that must not depend on how it was computed.

    Attributes:
        logprobs: one per token when asked for, else empty.
        prompt_logprobs: one per prompt token after the first, likewise.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer is not the expected one.

    Attributes:
        what: "token", "logprob", "prompt_logprob", "finish_reason" or "stop_reason".
        position: 0 for the first output token, or the first prompt token that has one; the number of tokens for a
            reason.
        expected, got: as text; "nothing" past an end.
    """

    request_id: RequestId
    what: str
    position: int
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.request_id}, {self.what} at {self.position}: expected {self.expected}, got {self.got}"


class AnswerCollector:
    """Outputs of an engine, put together per request."""

    def __init__(self) -> None:
        self._token_ids: dict[RequestId, list[int]] = {}
        self._logprobs: dict[RequestId, list[TokenLogprob]] = {}
        self._prompts: dict[RequestId, PromptLogprobs] = {}
        self._last: dict[RequestId, RequestOutput] = {}

    def add(self, output: RequestOutput) -> None:
        """Take what a step returned. Raises AssertionError if the request has ended already."""
        request_id = output.request_id
        assert request_id not in self._last, f"{request_id} got an output after its end"
        self._token_ids.setdefault(request_id, []).extend(output.token_ids)
        self._logprobs.setdefault(request_id, []).extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            assert request_id not in self._prompts, f"{request_id} got log-probabilities of its prompt twice"
            self._prompts[request_id] = output.prompt_logprobs
        if output.finish_reason is not None:
            self._last[request_id] = output

    def answer(self, request_id: RequestId) -> Answer:
        """What a request got. Raises AssertionError if it has not ended."""
        assert request_id in self._last, f"{request_id} has not ended"
        last = self._last[request_id]
        return Answer(
            tuple(self._token_ids[request_id]),
            tuple(self._logprobs[request_id]),
            last.finish_reason,
            last.stop_reason,
            _prompt_entries(self._prompts.get(request_id)),
        )


def compare(expected: Mapping[RequestId, Answer], got: Mapping[RequestId, Answer]) -> Difference | None:
    """Return the first difference in the order of `expected`, None if all answers are equal in every bit.

    Raises KeyError: a request has no answer in `got`.
    """
    return next((d for i, answer in expected.items() if (d := _compare_answer(i, answer, got[i]))), None)


def _compare_answer(request_id: RequestId, expected: Answer, got: Answer) -> Difference | None:
    for what, ours, theirs in (
        ("token", expected.token_ids, got.token_ids),
        ("logprob", expected.logprobs, got.logprobs),
        ("prompt_logprob", expected.prompt_logprobs, got.prompt_logprobs),
    ):
        for position, (a, b) in enumerate(zip_longest(ours, theirs)):
            if a != b:
                return Difference(request_id, what, position, _text(a), _text(b))
    end = len(expected.token_ids)
    if expected.finish_reason != got.finish_reason:
        return Difference(request_id, "finish_reason", end, _text(expected.finish_reason), _text(got.finish_reason))
    if expected.stop_reason != got.stop_reason:
        return Difference(request_id, "stop_reason", end, _text(expected.stop_reason), _text(got.stop_reason))
    return None


def _prompt_entries(found: PromptLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Without the prompt's ids, which are the same wherever the request runs."""
    return () if found is None else tuple(found.entries([0] * (len(found.logprobs) + 1), MAX_LOGPROBS))


def _text(value: object) -> str:
    return "nothing" if value is None else str(value)
