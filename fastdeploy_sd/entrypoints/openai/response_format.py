"""The Response object of /v1/responses and the named events of its stream.

A stream is: created, in_progress; the items of the output begin, grow and are done, one after the other; completed, or
incomplete when a limit ended it. All are numbered. What surrounds a delta travels with it, so that a stream that goes
on elsewhere needs to know the shown text and how many events there were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.logprobs import LogprobsFormat
from fastdeploy_sd.entrypoints.openai.response_output import COMPLETED, IN_PROGRESS, Event, Json, ResponseOutput
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter, speculate_metrics
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.answer_parser import TokenAligner
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import FinishReason, TokenLogprob
from fastdeploy_sd.wire.http.error_format import json_pieces, response_error, to_json

_INCOMPLETE = "incomplete"
# OpenAI's word for a limit, be it the request's or the context's.
_REASONS = {FinishReason.LENGTH: "max_output_tokens"}


class ResponseFormat(AnswerFormat):
    """One Response, whose output is the items that its text holds."""

    stream_end = ""
    split_depth = 6
    repeats_all = True

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._num_events = 0 if job.progress is None else job.progress.num_events
        self._parser = TokenAligner[Json](job.answer.parser())
        self._logprobs = LogprobsFormat(tokenizer)
        self._output = ResponseOutput(job.job_id)
        text, offsets = job.shown_of(0, tokenizer)
        self._grow(text, job.shown_logprobs_of(0), offsets)  # its events have been sent

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> dict[str, Any]:
        [completion] = completions
        self._grow(completion.text, completion.logprobs, completion.text_offsets, completion.finish_reason)
        return self._finished(completion, usage)

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        num_before = self._num_events
        events = [] if num_before else self._opening()
        grown = self._grow(delta.text, delta.logprobs, delta.text_offsets, delta.finish_reason)
        events += [self._event(name, values) for name, values in grown]
        is_last = delta.finish_reason is not None
        if is_last:
            response = self._finished(delta, usage)
            events.append(self._event(f"response.{response['status']}", {"response": response}))
        return StreamPart("".join(events), self._num_events - num_before, is_last) if events else None

    def ending(self, usage: UsageCounter) -> str:
        return ""

    def error(self, error: FdsdError) -> StreamPart:
        return StreamPart(response_error(error, self._num_events), is_last=True)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _opening(self) -> list[str]:
        begun = {"response": self._response(IN_PROGRESS)}
        return [self._event(name, begun) for name in ("response.created", "response.in_progress")]

    def _grow(
        self,
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        offsets: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> list[Event]:
        """Take more of the text, and its end; where log-probabilities are asked for, with those of its tokens."""
        if logprobs is None:
            parts = self._parser.push(text)
        else:
            parts = self._parser.push(text, self._logprobs.entries(logprobs), offsets)
        if finish_reason is not None:
            parts += self._parser.finish()
        events = [event for part, entries in parts for event in self._output.add(part, entries)]
        return events if finish_reason is None else events + self._output.end(_status(finish_reason))

    def _event(self, name: str, values: Mapping[str, Any]) -> str:
        value = {"type": name, "sequence_number": self._num_events, **values}
        self._num_events += 1
        has_logprobs = self._job.requests.sampling.logprobs is not None  # of all tokens, in the last events
        data = "".join(json_pieces(value, self.split_depth + 1)) if has_logprobs else to_json(value)
        return f"event: {name}\ndata: {data}\n\n"

    # ---- values -----------------------------------------------------------------------------------------------------

    def _finished(self, end: Completion | TextDelta, usage: UsageCounter) -> dict[str, Any]:
        assert end.finish_reason is not None, "a Response is finished when its text has ended"
        status = _status(end.finish_reason)
        response = self._response(status)
        if status == _INCOMPLETE:
            response["incomplete_details"] = {"reason": _REASONS.get(end.finish_reason, end.finish_reason.value)}
        response["usage"] = _usage_json(usage)
        if self._job.reports_speculation and end.metrics is not None:
            response["speculate_metrics"] = speculate_metrics(end.metrics, self._job.method, self._job.is_lossy)
        return response

    def _response(self, status: str) -> dict[str, Any]:
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
            "output": [] if status == IN_PROGRESS else self._output.values(),
            "parallel_tool_calls": echo.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": echo.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": json.loads(echo.text_format)}
            | ({} if echo.verbosity is None else {"verbosity": echo.verbosity}),
            "tool_choice": json.loads(echo.tool_choice),
            "tools": json.loads(echo.tools),
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(finish_reason: FinishReason) -> str:
    return COMPLETED if finish_reason is FinishReason.STOP else _INCOMPLETE


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
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }
