"""Splits the text of an answer into reasoning and content, and counts the reasoning tokens.

The output depends on the text alone, not on its pieces. Blanks around the marks belong to neither part. Thinking that
a limit cut off stays thinking.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from fastdeploy_sd.text.channels import ChannelSplitter
from fastdeploy_sd.text.reasoning_formats import SPACES, Display, ReasoningFormat, ReasoningOptions, Start


class Splitter(Protocol):
    """Splits one answer.

    Attributes:
        is_settled: what is to come is not thought.
        spans: from where to where in the text each thought reaches with its marks; None = it has no end yet.
    """

    @property
    def is_settled(self) -> bool: ...

    @property
    def spans(self) -> Sequence[tuple[int, int | None]]: ...

    def pieces(self, text: str) -> Sequence[tuple[str, str]]:
        """Take more text; return pieces (thought, said) as far as they are certain, in order."""
        ...

    def end_pieces(self) -> Sequence[tuple[str, str]]:
        """Return what was held back at the end of the text."""
        ...


def make_splitter(options: ReasoningOptions) -> Splitter:
    """Return what splits one answer."""
    if options.format.has_channels:
        return ChannelSplitter(options.start, options.display)
    return ThoughtSplitter(options.format, options.start, options.display)


class _State(Enum):
    """What is looked for, in the order of a whole answer."""

    OPENING = auto()  # as the first thing that is written
    CLOSING = auto()
    ANSWER_OPENING = auto()  # directly after the reasoning
    ANSWER_CLOSING = auto()
    NOTHING = auto()


class ThoughtSplitter:
    """State of one answer; linear in its text. `end` is of the closing mark: 0 = no thinking, None = not known yet."""

    def __init__(self, form: ReasoningFormat, start: Start, display: Display = Display.STREAMED) -> None:
        self._form, self._display = form, display
        self._thoughts: list[str] = []  # not told yet
        self._state = {Start.MAYBE: _State.OPENING, Start.INSIDE: _State.CLOSING}.get(start, self._after_thinking)
        self._held = ""  # perhaps the beginning of a mark
        self._blanks = _Blanks(drops_first=self._state in (_State.CLOSING, _State.ANSWER_OPENING))
        self._num_chars = 0
        self.end: int | None = 0 if start is Start.ANSWER else None

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends in the thinking."""
        return self._state is _State.CLOSING

    @property
    def is_settled(self) -> bool:
        """See Splitter."""
        return self.end is not None

    @property
    def spans(self) -> list[tuple[int, int | None]]:
        """See Splitter."""
        return [(0, self.end)] if self.end or self.is_inside else []

    def pieces(self, text: str) -> list[tuple[str, str]]:
        """See Splitter."""
        return [self.push(text)]

    def end_pieces(self) -> list[tuple[str, str]]:
        """See Splitter."""
        return [self.finish()]

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; return (thought, said) as far as they are certain."""
        self._num_chars += len(text)
        thought: list[str] = []
        said: list[str] = []
        rest = self._held + text
        self._held = ""
        while rest:
            match self._state:
                case _State.OPENING:
                    rest = self._look_ahead(rest, self._form.opening, _State.CLOSING)
                case _State.CLOSING:
                    rest = self._read(rest, self._form.closing, thought)
                case _State.ANSWER_OPENING:
                    rest = self._look_ahead(rest, self._form.answer_opening, _State.ANSWER_CLOSING)
                case _State.ANSWER_CLOSING:
                    rest = self._read(rest, self._form.answer_closing, said)
                case _State.NOTHING:
                    said.append(self._blanks.add(rest, holds_last=False))
                    rest = ""
        return self._told("".join(thought), is_over=not self.is_inside), "".join(said)

    def finish(self) -> tuple[str, str]:
        """Return what was held back at the end of the text."""
        left = self._blanks.add(self._held, holds_last=False)
        self._held = ""
        is_thought = self.is_inside
        self.end = self.end if is_thought else self.end or 0
        return self._told(left if is_thought else "", is_over=True), "" if is_thought else left

    def _told(self, thought: str, *, is_over: bool) -> str:
        if self._display is Display.STREAMED:
            return thought
        if self._display is not Display.HIDDEN:
            self._thoughts.append(thought)
        told = "".join(self._thoughts) if is_over else ""
        if is_over:
            self._thoughts.clear()
        return told

    @property
    def _after_thinking(self) -> _State:
        """What follows the thinking."""
        return _State.ANSWER_OPENING if self._form.answer_opening else _State.NOTHING

    def _look_ahead(self, text: str, mark: str, found: _State) -> str:
        """Skip a mark that comes next; return the text after it, "" when more text is needed to know."""
        words = text.lstrip(SPACES)
        self._blanks.add(text[: len(text) - len(words)], holds_last=True)
        if words.startswith(mark):
            self._state = found
            self._blanks = _Blanks(drops_first=True)
            return words[len(mark) :]
        if mark.startswith(words):
            self._held = words
            return ""
        self._state = _State.NOTHING
        self.end = self.end or 0
        return words

    def _read(self, text: str, mark: str, part: list[str]) -> str:
        """Add text to a part up to its closing mark, and return what comes after that."""
        place = text.find(mark)
        if place < 0:
            split = len(text) - _len_begun(text, mark)
            part.append(self._blanks.add(text[:split], holds_last=True))
            self._held = text[split:]
            return ""
        part.append(self._blanks.add(text[:place], holds_last=True))
        self._blanks = _Blanks(drops_first=True)
        rest = text[place + len(mark) :]
        if self._state is _State.CLOSING:
            self.end = self._num_chars - len(rest)
            self._state = self._after_thinking
        else:
            self._state = _State.NOTHING
        return rest


class _Blanks:
    """The blanks around a part; `drops_first` drops those in front of it."""

    def __init__(self, drops_first: bool) -> None:
        self._drops = drops_first
        self._held: list[str] = []

    def add(self, text: str, holds_last: bool) -> str:
        """Take more of the part and return what is certain; `holds_last`: blanks at its end may precede a mark."""
        if self._drops:
            text = text.lstrip(SPACES)
            self._drops = not text
        words = text.rstrip(SPACES) if holds_last else text
        if holds_last and not words:
            self._held.append(text)
            return ""
        certain = "".join([*self._held, words])
        self._held = [text[len(words) :]] if len(words) < len(text) else []
        return certain


def _len_begun(text: str, mark: str) -> int:
    """How many characters at the end of a text could begin a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


class ThoughtCounter:
    """Counts the tokens of an answer's thinking: those whose text begins in it, its marks included."""

    def __init__(self, options: ReasoningOptions) -> None:
        self._splitter = make_splitter(replace(options, display=Display.STREAMED))
        self._offsets = array("q")

    def add(self, text: str, text_offsets: Iterable[int]) -> None:
        """Take more of the answer: text, which may come late, and where the text of each further token begins."""
        if not self._splitter.is_settled:
            self._offsets.extend(text_offsets)
            self._splitter.pieces(text)

    @property
    def count(self) -> int:
        """Tokens of the thinking so far; all of them while it lasts."""
        return sum(self._num_before(end) - self._num_before(begin) for begin, end in self._splitter.spans)

    def _num_before(self, place: int | None) -> int:
        return len(self._offsets) if place is None else bisect_left(self._offsets, place)
