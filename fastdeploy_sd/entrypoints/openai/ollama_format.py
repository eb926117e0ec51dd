"""Answers in Ollama's form, whole and as lines of JSON; the last line of a stream has what an answer cost.

A call is a line only when its arguments are complete. The lines depend on the text only, so a stream that goes on
elsewhere is fed the shown text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.logprobs import LogprobsFormat
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.answer_parts import AnswerPart, Content, PartsDelta, ToolCallDelta, tool_call_id
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import FinishReason, RequestMetrics
from fastdeploy_sd.wire.http.error_format import line_error, to_json
from fastdeploy_sd.wire.http.event_stream import LINES
from fastdeploy_sd.wire.http.ollama_models import timestamp

Json = dict[str, Any]

_NS = 1_000_000_000


class OllamaFormat(AnswerFormat):
    """One answer; its text, thinking and calls are where the route has them."""

    media_type = LINES
    stream_end = ""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._logprobs_format = LogprobsFormat(tokenizer)
        self._parser = job.answer.parser()
        self._call: ToolCallDelta | None = None  # that is not complete yet
        self._grow(self._parser.push(job.shown_text_of(0, tokenizer)), is_last=False)  # its lines have been sent

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> Json:
        [completion] = completions
        parts = self._grow(self._parser.push(completion.text) + self._parser.finish(), is_last=True)
        return self._line(self._said(parts), completion, self._end(completion, usage))

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        is_last = delta.finish_reason is not None
        parts = self._grow(self._parser.push(delta.text) + (self._parser.finish() if is_last else []), is_last)
        lines = [] if parts.is_empty and not delta.logprobs else [self._line(self._said(parts), delta, {"done": False})]
        if is_last:
            lines.append(self._line(self._said(PartsDelta()), None, self._end(delta, usage)))
        return StreamPart("".join(to_json(line) + "\n" for line in lines), len(lines), is_last) if lines else None

    def ending(self, usage: UsageCounter) -> str:
        return ""

    def error(self, error: FdsdError) -> StreamPart:
        return StreamPart(line_error(error, 0), is_last=True)

    def _grow(self, parts: Iterable[AnswerPart], is_last: bool) -> PartsDelta:
        """Return the parts that can be told now: a call when it is complete. One without an object is text."""
        told: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, ToolCallDelta) and self._call is not None and part.index == self._call.index:
                self._call = ToolCallDelta(part.index, self._call.name, self._call.arguments + part.arguments)
                continue
            told += self._complete()
            if isinstance(part, ToolCallDelta):
                self._call = part
            else:
                told.append(part)
        return PartsDelta.of(told + (self._complete() if is_last else []))

    def _complete(self) -> list[AnswerPart]:
        call, self._call = self._call, None
        if call is None:
            return []
        return [call] if _arguments(call) is not None else [Content(f"{call.name or ''}: {call.arguments}")]

    def _said(self, parts: PartsDelta) -> Json:
        """The part of a line that has what is said; of /api/chat."""
        message: Json = {"role": "assistant", "content": parts.content}
        if parts.reasoning:
            message["thinking"] = parts.reasoning
        if parts.tool_calls:
            message["tool_calls"] = [self._called(call) for call in parts.tool_calls]
        return {"message": message}

    def _called(self, call: ToolCallDelta) -> Json:
        function = {"index": call.index, "name": call.name or "", "arguments": _arguments(call)}
        return {"id": tool_call_id(self._job.job_id, 0, call.index), "function": function}

    def _line(self, said: Json, part: Completion | TextDelta | None, end: Json) -> Json:
        line = {"model": self._job.model, "created_at": timestamp(self._job.created), **said, **end}
        if part is not None and part.logprobs is not None:
            line["logprobs"] = self._logprobs_format.entries(part.logprobs)
        return line

    def _end(self, end: Completion | TextDelta, usage: UsageCounter) -> Json:
        counts = usage.to_json()
        return {
            "done": True,
            "done_reason": "stop" if end.finish_reason is FinishReason.STOP else "length",
            **({} if end.metrics is None else durations(end.metrics)),
            "prompt_eval_count": counts["prompt_tokens"],
            "eval_count": counts["completion_tokens"],
        }


class GenerateFormat(OllamaFormat):
    """The same for /api/generate, which calls nothing."""

    def _said(self, parts: PartsDelta) -> Json:
        return {"response": parts.content} | ({"thinking": parts.reasoning} if parts.reasoning else {})


def loaded_answer(model: str, created: float, is_chat: bool) -> Json:
    """Return the answer to a request that asks for no text."""
    said: Json = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": timestamp(created), **said, "done": True, "done_reason": "load"}


def _arguments(call: ToolCallDelta) -> Json | None:
    """The arguments as a value, None where they are no whole object."""
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def durations(metrics: RequestMetrics) -> dict[str, int]:
    """Return times in nanoseconds; `load_duration` is the one before the prompt was begun."""
    begin, first = metrics.arrival_time, metrics.first_token_time or metrics.finished_time
    scheduled = metrics.first_scheduled_time or begin
    spans = {
        "total_duration": metrics.finished_time - begin,
        "load_duration": scheduled - begin,
        "prompt_eval_duration": first - scheduled,
        "eval_duration": metrics.finished_time - first,
    }
    return {name: max(1, round(span * _NS)) for name, span in spans.items()}  # clients divide by them
