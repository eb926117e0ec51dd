"""The parts of an answer: reasoning, content and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before its answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the model says; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of call `index` of the answer: the function's name in its first delta only, and more JSON of `arguments`."""

    index: int
    name: str | None
    arguments: str


AnswerPart = Reasoning | Content | ToolCallDelta


@dataclass(frozen=True, slots=True)
class PartsDelta:
    """Parts by kind, with at most one of each tool call."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[AnswerPart]) -> Self:
        """Return the parts, joined; linear in their length."""
        reasoning: list[str] = []
        content: list[str] = []
        names: dict[int, str | None] = {}
        arguments: dict[int, list[str]] = {}
        for part in parts:
            match part:
                case Reasoning(text):
                    reasoning.append(text)
                case Content(text):
                    content.append(text)
                case ToolCallDelta(index, name, more):
                    names[index] = names.get(index) or name
                    arguments.setdefault(index, []).append(more)
        calls = tuple(ToolCallDelta(i, name, "".join(arguments[i])) for i, name in names.items())
        return cls("".join(reasoning), "".join(content), calls)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.reasoning or self.content or self.tool_calls)


def tool_call_id(job_id: str, choice: int, index: int) -> str:
    """Return the id of a call: made from where it stands, so that another instance that goes on says the same."""
    return "call_" + hashlib.sha256(f"{job_id}/{choice}/{index}".encode()).hexdigest()[:24]
