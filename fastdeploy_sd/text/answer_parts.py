"""Splits the text of an answer into its parts: reasoning, content and tool calls. Knows no tokens and no HTTP.

A parser is a function of the text: its output after n characters does not depend on the pieces in which they came. So a
stream adds up to the whole, and another instance can continue it from the shown text. No character is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from fastdeploy_sd.text.reasoning import ThoughtSplitter


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
    """More of a call.

    Attributes:
        index: which call of the answer, from 0; calls follow one another.
        name: of the function, in the call's first delta; None in the others.
        arguments: more of their JSON text.
    """

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


class ToolParser(Protocol):
    """Finds calls in what the model says. State of one answer.

    Attributes:
        is_over: a call that equals an earlier one came: the answer ends before it.
    """

    is_over: bool

    def push(self, text: str) -> list[AnswerPart]:
        """Take more text; return the content and calls that became certain, in order."""
        ...

    def finish(self) -> list[AnswerPart]:
        """Return what was held back at the end of the text."""
        ...


class AnswerParser:
    """State of one answer: first what was thought is taken out of its text, then the calls."""

    def __init__(self, splitter: ThoughtSplitter | None = None, tools: ToolParser | None = None) -> None:
        self._splitter = splitter
        self._tools = tools

    @property
    def is_over(self) -> bool:
        """Whether a call that equals an earlier one has ended the answer; see ToolParser."""
        return self._tools is not None and self._tools.is_over

    def push(self, text: str) -> list[AnswerPart]:
        """Take more text; return the parts that became certain, in order."""
        if self._splitter is None:
            return self._said(text)
        return self._split(*self._splitter.push(text))

    def finish(self) -> list[AnswerPart]:
        """Return what was held back at the end of the text."""
        parts = [] if self._splitter is None else self._split(*self._splitter.finish())
        return parts + ([] if self._tools is None else self._tools.finish())

    def _split(self, thought: str, said: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = [Reasoning(thought)] if thought else []
        return parts + self._said(said)

    def _said(self, text: str) -> list[AnswerPart]:
        if self._tools is not None:
            return self._tools.push(text)
        return [Content(text)] if text else []


def tool_call_id(job_id: str, choice: int, index: int) -> str:
    """Return the id of a call: made from where it stands, so that another instance that goes on says the same."""
    return "call_" + hashlib.sha256(f"{job_id}/{choice}/{index}".encode()).hexdigest()[:24]
