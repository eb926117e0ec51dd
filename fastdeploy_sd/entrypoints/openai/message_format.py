"""The Message of /v1/messages (Anthropic's) and the named events of its stream.

A stream is: message_start; blocks that start, grow and stop, one after the other; message_delta with the reason of the
end, and message_stop. The blocks depend on the text only, so a stream that goes on elsewhere is fed the shown text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.answer_parts import AnswerPart, Content, PartsDelta, Reasoning, ToolCallDelta, tool_call_id
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import FinishReason
from fastdeploy_sd.wire.http.error_format import message_error, to_json

Json = dict[str, Any]


class MessageFormat(AnswerFormat):
    """One Message, whose content is the blocks that its text holds: thinking, text and tool_use."""

    stream_end = ""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._num_events = 0 if job.progress is None else job.progress.num_events
        self._parser = job.answer.parser()
        self._num_blocks = 0
        self._open: AnswerPart | None = None  # of the block that grows
        self._has_call = False
        self._grow(self._parser.push(job.shown_text_of(0, tokenizer)))  # its events have been sent

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> Json:
        [completion] = completions
        parts = PartsDelta.of(self._parser.push(completion.text) + self._parser.finish())
        blocks: list[Json] = []
        if parts.reasoning:
            blocks.append(_thinking(parts.reasoning))
        if parts.content:
            blocks.append({"type": "text", "text": parts.content})
        for call in parts.tool_calls:
            block = self._called(call)
            self._has_call |= block["type"] == "tool_use"
            blocks.append(block)
        return self._message(blocks, usage) | self._end(completion)

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        num_before = self._num_events
        events = [] if num_before else [self._event("message_start", {"message": self._message([], usage)})]
        parts = self._parser.push(delta.text)
        is_last = delta.finish_reason is not None
        if is_last:
            parts += self._parser.finish()
        events += self._grow(parts)
        if is_last:
            events += self._stop_block()
            values = {"delta": self._end(delta), "usage": _usage(usage)}
            events += [self._event("message_delta", values), self._event("message_stop", {})]
        return StreamPart("".join(events), self._num_events - num_before, is_last) if events else None

    def ending(self, usage: UsageCounter) -> str:
        return ""

    def error(self, error: FdsdError) -> StreamPart:
        return StreamPart(message_error(error, self._num_events), is_last=True)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _grow(self, parts: Sequence[AnswerPart]) -> list[str]:
        events: list[str] = []
        for part in parts:
            if not _is_same_block(self._open, part):
                events += self._stop_block()
                events.append(self._start_block(part))
            grown = _delta(part)
            if grown is not None:
                events.append(self._event("content_block_delta", self._place | {"delta": grown}))
        return events

    def _start_block(self, part: AnswerPart) -> str:
        self._open = part
        self._num_blocks += 1
        match part:
            case ToolCallDelta(index, name):
                self._has_call = True
                call_id = tool_call_id(self._job.job_id, 0, index)
                block: Json = {"type": "tool_use", "id": call_id, "name": name or "", "input": {}}
            case Reasoning():
                block = _thinking("")
            case _:
                block = {"type": "text", "text": ""}
        return self._event("content_block_start", self._place | {"content_block": block})

    def _stop_block(self) -> list[str]:
        if self._open is None:
            return []
        self._open = None
        return [self._event("content_block_stop", self._place)]

    @property
    def _place(self) -> Json:
        return {"index": self._num_blocks - 1}

    def _event(self, name: str, values: Json) -> str:
        self._num_events += 1
        return f"event: {name}\ndata: {to_json({'type': name, **values})}\n\n"

    # ---- values -----------------------------------------------------------------------------------------------------

    def _message(self, blocks: list[Json], usage: UsageCounter) -> Json:
        return {
            "id": self._job.job_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _called(self, call: ToolCallDelta) -> Json:
        """A call with its input. Of one that a limit has cut no input can be told: it is shown as the text it is."""
        try:
            value = json.loads(call.arguments or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            return {"type": "text", "text": f"{call.name or ''}: {call.arguments}"}
        call_id = tool_call_id(self._job.job_id, 0, call.index)
        return {"type": "tool_use", "id": call_id, "name": call.name or "", "input": value}

    def _end(self, end: Completion | TextDelta) -> Json:
        reason, sequence = "max_tokens", None
        if end.finish_reason is FinishReason.STOP:
            reason = "tool_use" if self._has_call else "end_turn"
            if isinstance(end.stop_reason, str):
                reason, sequence = "stop_sequence", end.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _is_same_block(before: AnswerPart | None, part: AnswerPart) -> bool:
    if isinstance(before, ToolCallDelta) and isinstance(part, ToolCallDelta):
        return before.index == part.index
    return before is not None and before.__class__ is part.__class__


def _delta(part: AnswerPart) -> Json | None:
    match part:
        case ToolCallDelta(_, _, arguments):
            return {"type": "input_json_delta", "partial_json": arguments} if arguments else None
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case Content(text):
            return {"type": "text_delta", "text": text}


def _usage(usage: UsageCounter) -> Json:
    """The usage in Anthropic's words: `input_tokens` are those that the cache did not have."""
    counts = usage.to_json()
    num_cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": counts["completion_tokens"],
    }
