"""Turns in Ollama's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import NotSupported
from fastdeploy_sd.entrypoints.openai.protocol.message import ChatMessage
from fastdeploy_sd.text.chat_template import Message


class OllamaMessage(ChatMessage):
    """One turn.

    Attributes:
        thinking: what the assistant thought before its answer.
        tool_name: of the function whose result a turn of a tool is.
    """

    thinking: str | None = None
    tool_name: str | None = None
    images: NotSupported = None

    def as_turn(self) -> Message:
        turn = super().as_turn()
        thought = self.thinking or turn.reasoning_content
        return replace(turn, name=self.name or self.tool_name, reasoning_content=thought)


def with_call_ids(turns: Sequence[Message]) -> list[Message]:
    """Return the turns with an id for each call without one, and for its result: the next of its function."""
    open_calls: list[tuple[str, str]] = []  # id and function of calls whose result has not come

    def named(i: int, turn: Message) -> Message:
        if turn.tool_calls:
            calls = tuple({"id": f"call_{i}_{j}", **call} for j, call in enumerate(turn.tool_calls))
            open_calls[:] = [_id_and_name(call) for call in calls]
            return replace(turn, tool_calls=calls)
        if turn.role != "tool" or turn.tool_call_id is not None:
            return turn
        mine = next((call for call in open_calls if turn.name in (None, call[1])), None)
        if mine is None:
            return turn
        open_calls.remove(mine)
        return replace(turn, tool_call_id=mine[0])

    return [named(i, turn) for i, turn in enumerate(turns)]


def _id_and_name(call: Mapping[str, Any]) -> tuple[str, str]:
    return call["id"], call["function"]["name"]
