"""How the choices of a response and of a stream chunk look: one class for chat, one for text completions.

Knows OpenAI's JSON and FastDeploy's extra fields; knows no sockets and no engine.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from fastdeploy_sd.entrypoints.openai.job import AnswerOptions, Job
from fastdeploy_sd.entrypoints.openai.logprobs import (
    chat_draft_logprobs,
    chat_logprobs,
    completion_draft_logprobs,
    completion_logprobs,
)
from fastdeploy_sd.entrypoints.openai.speculate_metrics import speculate_metrics
from fastdeploy_sd.entrypoints.text.completion import Completion
from fastdeploy_sd.entrypoints.text.output_processor import TextDelta
from fastdeploy_sd.entrypoints.text.tokenizer import Tokenizer
from fastdeploy_sd.types import RequestMetrics


class ChoiceFormat(Protocol):
    """JSON of choices.

    Attributes:
        response_object, chunk_object: OpenAI's `object` of a whole response and of a stream chunk.
    """

    response_object: str
    chunk_object: str

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""
        ...

    def chunk(self, choice: int, delta: TextDelta, is_first: bool) -> dict[str, Any] | None:
        """Return what a delta adds to a choice, None when a client would learn nothing from it."""
        ...


class ChatFormat:
    """Choices of /v1/chat/completions."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._answer = job.answer
        self._tokenizer = tokenizer

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        if self._answer.returns_token_ids:
            message["prompt_token_ids"] = self._job.prompt_token_ids_of(completion.index)
            message["completion_token_ids"] = list(completion.token_ids)
        choice = {"index": completion.index, "message": message} | self._logprobs(completion)
        return choice | _ending(self._job, completion)

    def chunk(self, choice: int, delta: TextDelta, is_first: bool) -> dict[str, Any] | None:
        """Return what a delta adds to a choice, None when a client would learn nothing from it."""
        if not is_first and _is_silent(self._answer, delta):
            return None
        content: dict[str, Any] = {"role": "assistant"} if is_first else {}
        content["content"] = delta.text
        if self._answer.returns_token_ids:
            if is_first:
                content["prompt_token_ids"] = self._job.prompt_token_ids_of(choice)
            content["completion_token_ids"] = list(delta.token_ids)
        return {"index": choice, "delta": content} | self._logprobs(delta) | _ending(self._job, delta)

    def _logprobs(self, part: Completion | TextDelta) -> dict[str, Any]:
        """`logprobs`, and `draft_logprobs` when asked for."""
        logprobs = None if part.logprobs is None else chat_logprobs(self._tokenizer, part.logprobs)
        if not self._answer.includes_draft_logprobs:
            return {"logprobs": logprobs}
        return {
            "logprobs": logprobs,
            "draft_logprobs": chat_draft_logprobs(self._tokenizer, part.draft_logprobs or ()),
        }


class CompletionFormat:
    """Choices of /v1/completions."""

    response_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._answer = job.answer
        self._tokenizer = tokenizer

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""
        text = self._echo(completion.index) + completion.text
        choice = {"index": completion.index, "text": text} | self._logprobs(completion)
        if self._answer.returns_token_ids:
            choice["prompt_token_ids"] = self._job.prompt_token_ids_of(completion.index)
            choice["completion_token_ids"] = list(completion.token_ids)
        return choice | _ending(self._job, completion)

    def chunk(self, choice: int, delta: TextDelta, is_first: bool) -> dict[str, Any] | None:
        """Return what a delta adds to a choice, None when a client would learn nothing from it."""
        text = (self._echo(choice) if is_first else "") + delta.text
        if not text and _is_silent(self._answer, delta):
            return None
        entry = {"index": choice, "text": text} | self._logprobs(delta)
        if self._answer.returns_token_ids:
            if is_first:
                entry["prompt_token_ids"] = self._job.prompt_token_ids_of(choice)
            entry["completion_token_ids"] = list(delta.token_ids)
        return entry | _ending(self._job, delta)

    def _echo(self, choice: int) -> str:
        """The prompt as text, when asked for; token ids are decoded with their control tokens visible."""
        if not self._answer.echo:
            return ""
        text = self._job.echoed_text_of(choice)
        return (
            self._tokenizer.decode(self._job.prompt_token_ids_of(choice), skip_hidden=False) if text is None else text
        )

    def _logprobs(self, part: Completion | TextDelta) -> dict[str, Any]:
        """`logprobs`, and `draft_logprobs` when asked for."""
        logprobs = None
        if part.logprobs is not None:
            logprobs = completion_logprobs(self._tokenizer, part.logprobs, part.text_offsets)
        if not self._answer.includes_draft_logprobs:
            return {"logprobs": logprobs}
        drafts, offsets = part.draft_logprobs or (), part.draft_text_offsets
        return {"logprobs": logprobs, "draft_logprobs": completion_draft_logprobs(self._tokenizer, drafts, offsets)}


def _ending(job: Job, part: Completion | TextDelta) -> dict[str, Any]:
    """How a choice ended, and in its last chunk what was measured."""
    ending: dict[str, Any] = {
        "finish_reason": None if part.finish_reason is None else part.finish_reason.value,
        "stop_reason": part.stop_reason,
    }
    if job.answer.collects_metrics and part.metrics is not None:
        ending["metrics"] = _metrics_json(part.metrics)
    if job.reports_speculation and part.metrics is not None:
        ending["speculate_metrics"] = speculate_metrics(part.metrics.drafts, job.method, job.is_lossy)
    return ending


def _is_silent(answer: AnswerOptions, delta: TextDelta) -> bool:
    """Whether a delta shows nothing: its text is held back and nobody asked for its tokens."""
    shows_tokens = delta.token_ids and (answer.returns_token_ids or delta.logprobs is not None)
    return not (delta.text or shows_tokens or delta.finish_reason is not None)


def _metrics_json(metrics: RequestMetrics) -> dict[str, Any]:
    """Times in seconds since the epoch; null for what did not happen or was not reported."""
    times = {name: value or None for name, value in asdict(metrics).items() if name.endswith("_time")}
    return times | {"num_preemptions": metrics.num_preemptions}
