"""Answers of /infill in llama.cpp's form, whole and as events; the last event of a stream has what the answer cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart, data_event
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.types import FinishReason, RequestMetrics
from fastdeploy_sd.wire.http.error_format import chunk_error

Json = dict[str, Any]
_MS = 1000.0


class InfillFormat(AnswerFormat):
    """One text."""

    stream_end = ""

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> Json:
        [completion] = completions
        return self._chosen(self._said(completion.text, is_last=True) | self._end(completion, usage))

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        is_last = delta.finish_reason is not None
        events = [self._said(delta.text, is_last=False)] if delta.text else []
        if is_last:
            events.append(self._chosen(self._said("", is_last=True) | self._end(delta, usage)))
        return StreamPart("".join(map(data_event, events)), len(events), is_last) if events else None

    def ending(self, usage: UsageCounter) -> str:
        return ""

    def error(self, error: FdsdError) -> StreamPart:
        return StreamPart(chunk_error(error, 0), is_last=True)

    def _said(self, text: str, *, is_last: bool) -> Json:
        return {"index": 0, "content": text, "tokens": [], "id_slot": -1, "stop": is_last}

    def _chosen(self, answer: Json) -> Json:
        """Return the fields that were asked for; that of an object is a/b, and stays so called."""
        if not self._answer.fields:
            return answer
        found = {path: _value_at(answer, path) for path in self._answer.fields}
        return {path: value for path, value in found.items() if value is not None}

    def _end(self, end: Completion | TextDelta, usage: UsageCounter) -> Json:
        counts = usage.to_json()
        num_cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        stop = end.stop_reason if isinstance(end.stop_reason, str) else ""
        is_full = end.finish_reason is not FinishReason.STOP
        return {
            "model": self._job.model,
            "tokens_predicted": counts["completion_tokens"],
            "tokens_evaluated": counts["prompt_tokens"],
            "tokens_cached": num_cached,
            "truncated": False,
            "stop_type": "limit" if is_full else "word" if stop else "eos",
            "stopping_word": stop,
            "timings": {} if end.metrics is None else _timings(end.metrics, counts, num_cached),
        }


def _value_at(answer: Json, path: str) -> object:
    value: object = answer
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _timings(metrics: RequestMetrics, counts: Json, num_cached: int) -> Json:
    first = metrics.first_token_time or metrics.finished_time
    begin = metrics.first_scheduled_time or metrics.arrival_time
    return {
        "cache_n": num_cached,
        **_rate("prompt", counts["prompt_tokens"] - num_cached, first - begin),
        **_rate("predicted", counts["completion_tokens"], metrics.finished_time - first),
    }


def _rate(name: str, num_tokens: int, seconds: float) -> Json:
    milliseconds = max(seconds * _MS, 0.001)  # clients divide by it
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(num_tokens, 1),
        f"{name}_per_second": num_tokens * _MS / milliseconds,
    }
