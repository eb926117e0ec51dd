"""The Response object of /v1/responses and the named events of its stream.

A stream is: created, in_progress, the message and its text part begin; deltas of the text; the part and the message are
done; completed, or incomplete when a limit ended it. All are numbered. The first four and the last four travel with the
delta they surround, so that a stream that goes on elsewhere needs to know of its events only how many there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart
from fastdeploy_sd.entrypoints.openai.error_format import to_json
from fastdeploy_sd.entrypoints.openai.job import GenerationJob, UsageCounter
from fastdeploy_sd.entrypoints.openai.speculate_metrics import speculate_metrics
from fastdeploy_sd.entrypoints.openai.stream_errors import response_error
from fastdeploy_sd.entrypoints.text.completion import Completion
from fastdeploy_sd.entrypoints.text.output_processor import OutputProcessor, TextDelta
from fastdeploy_sd.entrypoints.text.tokenizer import Tokenizer
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.types import FinishReason

_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
# OpenAI's word for a limit, be it the request's or the context's.
_REASONS = {FinishReason.LENGTH: "max_output_tokens"}


class ResponseFormat(AnswerFormat):
    """One Response, whose output is one message."""

    stream_end = ""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._item_id = "msg_" + job.job_id.removeprefix("resp_")
        self._num_events = 0
        self._texts: list[str] = []
        if job.progress is not None:
            self._num_events = job.progress.num_events
            self._texts.append(OutputProcessor(job.requests[0], tokenizer).shown_text)

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> dict[str, Any]:
        [completion] = completions
        return self._finished(completion.text, completion, usage)

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        is_first, is_last = self._num_events == 0, delta.finish_reason is not None
        if not (is_first or is_last or delta.text):
            return None
        num_before = self._num_events
        self._texts.append(delta.text)
        events = self._opening() if is_first else []
        if delta.text:
            events.append(self._event("response.output_text.delta", self._place, delta=delta.text, logprobs=[]))
        if is_last:
            events += self._closing("".join(self._texts), delta, usage)
        return StreamPart("".join(events), self._num_events - num_before, is_last)

    def ending(self, usage: UsageCounter) -> str:
        return ""

    def error(self, error: FdsdError) -> StreamPart:
        return StreamPart(response_error(error, self._num_events), is_last=True)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _opening(self) -> list[str]:
        begun = self._response(_IN_PROGRESS, [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._message(_IN_PROGRESS, [])),
            self._event("response.content_part.added", self._place, part=_text_part("")),
        ]

    def _closing(self, text: str, delta: TextDelta, usage: UsageCounter) -> list[str]:
        response = self._finished(text, delta, usage)
        [message] = response["output"]
        place = self._place
        return [
            self._event("response.output_text.done", place, text=text, logprobs=[]),
            self._event("response.content_part.done", place, part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=message),
            self._event(f"response.{response['status']}", response=response),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        """Where the text part is."""
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, place: dict[str, Any] | None = None, **values: object) -> str:
        value = {"type": name, "sequence_number": self._num_events, **(place or {}), **values}
        self._num_events += 1
        return f"event: {name}\ndata: {to_json(value)}\n\n"

    # ---- values -----------------------------------------------------------------------------------------------------

    def _finished(self, text: str, end: Completion | TextDelta, usage: UsageCounter) -> dict[str, Any]:
        is_complete = end.finish_reason is FinishReason.STOP
        status = _COMPLETED if is_complete else _INCOMPLETE
        response = self._response(status, [self._message(status, [_text_part(text)])])
        if end.finish_reason is not None and not is_complete:
            response["incomplete_details"] = {"reason": _REASONS.get(end.finish_reason, end.finish_reason.value)}
        response["usage"] = _usage_json(usage)
        if self._job.reports_speculation and end.metrics is not None:
            response["speculate_metrics"] = speculate_metrics(end.metrics.drafts, self._job.method, self._job.is_lossy)
        return response

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Everything a Response has; what a request asked for reads as it took effect, so `store` is false."""
        job, sampling = self._job, self._job.requests.sampling
        echo = job.answer.response
        assert echo is not None, "a job of /v1/responses knows what its Response repeats"
        return {
            "id": job.job_id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": echo.instructions,
            "max_output_tokens": echo.max_output_tokens,
            "max_tool_calls": None,
            "metadata": dict(echo.metadata),
            "model": job.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": echo.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | ({} if echo.verbosity is None else {"verbosity": echo.verbosity}),
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage_json(usage: UsageCounter) -> dict[str, Any]:
    """The usage in the names of /v1/responses. Writing to the cache has no price here, so none is counted."""
    counts = usage.to_json()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
