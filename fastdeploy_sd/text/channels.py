"""Splits the text of an answer in channels (gpt-oss) into reasoning, content and the calls between them.

    <|channel|>analysis<|message|>Hm.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}<|call|>

The output depends on the text alone, not on its pieces. A call stays as it is written, marks and all, for the parser of
calls. Messages of one kind are joined by a line break.

Source: openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto

from fastdeploy_sd.text.reasoning_formats import SPACES, Display, Start

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ASSISTANT = START + "assistant"
# The last token of a turn: after a call the model waits for its result.
TURN_ENDS = (RETURN, CALL)
ENDS = (END, *TURN_ENDS)
FUNCTIONS = "functions."

_MAX_HEADER_CHARS = 256
# Text is taken in pieces of so many characters: each mark looks through what is left of its piece.
_PIECE_CHARS = 1024
_HEADER = re.compile(r"(?:<\|(?:start|channel|constrain)\|>|[\w .=\n-])*")
_HEADER_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def recipient_of(header: str) -> str:
    """Return whom a message is written to by its header, "" = the user."""
    found = _RECIPIENT.search(header)
    return found[1] if found else ""


class _Kind(Enum):
    THOUGHT = auto()
    SAID = auto()
    CALL = auto()


def _kind_of(header: str) -> _Kind:
    channels, recipient = _CHANNEL.findall(header), recipient_of(header)
    is_analysis = bool(channels) and channels[-1] == "analysis"
    if recipient and (recipient.startswith(FUNCTIONS) or not is_analysis):
        return _Kind.CALL
    return _Kind.THOUGHT if is_analysis else _Kind.SAID


class ChannelSplitter:
    """State of one answer; see Splitter."""

    is_settled = False

    def __init__(self, start: Start, display: Display) -> None:
        self._display = display
        self._kind = {Start.INSIDE: _Kind.THOUGHT, Start.ANSWER: _Kind.SAID}.get(start)
        self._is_in_header = False
        self._is_fresh = True  # no text since the last message: a header may begin without a mark
        self._blanks: list[str] = []  # before what may be a header
        self._held = ""
        self._num_chars = 0
        self._told: set[_Kind] = set()  # kinds of which there was text in earlier messages
        self._has_text = False  # in this message
        self._thoughts: list[str] = []  # not told yet
        self._parts: list[tuple[str, str]] = []
        self.spans: list[tuple[int, int | None]] = [(0, None)] if start is Start.INSIDE else []

    def pieces(self, text: str) -> list[tuple[str, str]]:
        """Take more text; return pieces (thought, said) as far as they are certain, in order."""
        for begin in range(0, len(text), _PIECE_CHARS):
            self._push(text[begin : begin + _PIECE_CHARS])
        return self._take()

    def _push(self, text: str) -> None:
        self._num_chars += len(text)
        rest, self._held = self._held + text, ""
        while rest:
            if self._kind is not None:
                rest = self._read_body(rest, self._kind)
            elif self._is_in_header:
                rest = self._read_header(rest)
            else:
                rest = self._read_outside(rest)

    def end_pieces(self) -> list[tuple[str, str]]:
        """Return what was held back at the end of the text; a header that a limit cuts off says nothing."""
        if self._is_in_header and self._held.startswith((START, CHANNEL)):
            self._held = ""
        is_empty = self._kind is None and not self._told
        rest = ("".join(self._blanks) if is_empty or self._held else "") + self._held
        self._held = ""
        self._blanks.clear()
        self._add(self._kind or _Kind.SAID, rest)
        self._tell_thoughts()
        return self._take()

    def _read_outside(self, text: str) -> str:
        """Take text between messages, where nothing but marks is expected, up to the next header."""
        if self._is_fresh:
            words = text.lstrip(SPACES)
            self._blanks.append(text[: len(text) - len(words)])
            text = words
        if self._is_fresh and text.startswith("to="):
            self._is_in_header = True
            return text
        places = {text.find(mark): mark for mark in MARKS if mark in text}
        place = min(places, default=-1)
        if place < 0:
            is_begun = self._is_fresh and "to=".startswith(text)
            num_held = len(text) if is_begun else _len_begun(text, MARKS)
            self._say_loose(text[: len(text) - num_held])
            self._held = text[len(text) - num_held :]
            return ""
        self._say_loose(text[:place])
        if places[place] in ENDS:
            self._leave()
            return text[place + len(places[place]) :]
        self._is_in_header = True
        return text[place:]

    def _say_loose(self, text: str) -> None:
        if text:
            self._add(_Kind.SAID, "".join(self._blanks) + text)
            self._is_fresh = False
            self._blanks.clear()

    def _read_header(self, text: str) -> str:
        """Take a header that is complete; one that cannot become a header is content."""
        match = _HEADER.match(text, 0, _MAX_HEADER_CHARS)
        end = match.end() if match else 0
        rest = text[end:]
        if end < _MAX_HEADER_CHARS and rest.startswith(MESSAGE):
            self._begin(text[:end], len(rest))
            return rest[len(MESSAGE) :]
        if end < _MAX_HEADER_CHARS and any(mark.startswith(rest) for mark in _HEADER_MARKS):
            self._held = text
            return ""
        self._is_in_header = False
        self._say_loose(text[: max(end, 1)])
        return text[max(end, 1) :]

    def _begin(self, header: str, num_left: int) -> None:
        self._leave()
        self._is_in_header = False
        self._kind = _kind_of(header)
        if self._kind is _Kind.THOUGHT:
            self.spans.append((self._num_chars - num_left - len(header), None))
        elif self._kind is _Kind.CALL:
            self._add(_Kind.CALL, header + MESSAGE)

    def _read_body(self, text: str, kind: _Kind) -> str:
        """Take the text of a message; a model that forgets its end begins the next one."""
        marks = (*ENDS, ASSISTANT)
        place, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
        if place < 0:
            split = len(text) - _len_begun(text, marks)
            self._add(kind, text[:split])
            self._held = text[split:]
            return ""
        rest = text[place:].removeprefix(mark if mark in ENDS else "")
        self._add(kind, text[: len(text) - len(rest)] if kind is _Kind.CALL else text[:place])
        if kind is _Kind.THOUGHT:
            self.spans[-1] = self.spans[-1][0], self._num_chars - len(rest)
            self._tell_thoughts()
        self._leave()
        return rest

    def _leave(self) -> None:
        """A message is over."""
        self._kind, self._is_fresh, self._has_text = None, True, False
        self._blanks.clear()

    def _add(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if kind is not _Kind.CALL and not self._has_text:
            text = "\n" + text if kind in self._told else text
            self._told.add(kind)
            self._has_text = True
        if kind is not _Kind.THOUGHT:
            self._parts.append(("", text))
        elif self._display is Display.STREAMED:
            self._parts.append((text, ""))
        elif self._display is not Display.HIDDEN:
            self._thoughts.append(text)

    def _tell_thoughts(self) -> None:
        if self._thoughts:
            self._parts.append(("".join(self._thoughts), ""))
            self._thoughts.clear()

    def _take(self) -> list[tuple[str, str]]:
        parts, self._parts = self._parts, []
        return parts


def _len_begun(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text could begin one of the marks."""
    longest = max(len(mark) for mark in marks) - 1
    begun = (n for n in range(min(longest, len(text)), 0, -1) if any(mark.startswith(text[-n:]) for mark in marks))
    return next(begun, 0)
