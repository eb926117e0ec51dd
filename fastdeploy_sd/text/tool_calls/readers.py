"""Readers of single things in calls: literal text, names, JSON, and text up to a tag. They raise Malformed.

Each takes exactly the characters of its thing, or begins with one that was taken already and says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable

from fastdeploy_sd.text.tool_calls.json_scan import WHITESPACE, JsonScan, Malformed
from fastdeploy_sd.text.tool_calls.scanner import Sink

CharReader = Generator[None, str, str]
VoidReader = Generator[None, str, None]
# Longer than any name or tag.
_MAX_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")


def read_space() -> CharReader:
    """Return the first character after white space."""
    char = yield
    while char in WHITESPACE:
        char = yield
    return char


def read_literal(text: str, first: str = "") -> VoidReader:
    """Read this text, of which `first` was taken already."""
    if not text.startswith(first):
        raise Malformed
    for expected in text[len(first) :]:
        if (yield) != expected:
            raise Malformed


def read_one_of(texts: Iterable[str], first: str = "") -> CharReader:
    """Read one of some texts, none of which begins another, and return it; `first` was taken already."""
    taken, candidates = first, [*texts]
    while taken not in candidates:
        if not any(text.startswith(taken) for text in candidates):
            raise Malformed
        taken += yield
    return taken


def read_until(ends: str, first: str = "") -> Generator[None, str, tuple[str, str]]:
    """Return a short text and the character after it, which is one of `ends`; `first` was taken already."""
    taken = first
    if first and first in ends:
        return "", first
    while True:
        char = yield
        if char in ends:
            return taken, char
        taken += char
        if len(taken) > _MAX_CHARS:
            raise Malformed


def read_object(sink: Sink, first: str, name: str) -> VoidReader:
    """Begin a call of a function with arguments that are a JSON object, whose first character was taken; read them."""
    scan = JsonScan()
    char = _object_start(first)
    sink.begin(name)
    while not scan.push(char):
        sink.arguments(char)
        char = yield
    sink.arguments(char)
    sink.close()


def read_call(sink: Sink, first: str, *, is_bare: bool = False) -> VoidReader:
    """Read a call that is a JSON object with a name and arguments, of which the first character was taken.

    Other members mean nothing, and some models double the outer braces. With `is_bare` nothing but the object says that
    it is a call: its first member is the name, its second the arguments.
    """
    scan = JsonScan()
    call = _Call(sink, is_bare=is_bare)
    scan.push(_object_start(first))
    char = yield from read_space()
    is_doubled = char == "{"
    if is_doubled:
        char = yield
    while not scan.push(char):
        call.take(scan.member, char)
        char = yield
    call.end()
    if is_doubled:
        yield from read_literal("}", (yield from read_space()))


class _Call:
    """The members of a call object so far."""

    def __init__(self, sink: Sink, *, is_bare: bool) -> None:
        self._sink = sink
        self._is_bare = is_bare
        self._member: str | None = None
        self._name = ""
        self._value: list[str] = []  # of the name, and of arguments that come before it
        self._has_begun = False
        self._are_complete = False
        self._early = ""

    def take(self, member: str | None, char: str) -> None:
        """Take a character, and the member to whose value it belongs."""
        if member != self._member:
            self._end_member()
            self._member = member
            if self._is_bare and member is not None and not self._has_begun:
                self._verify_order(member)
            if member in _ARGUMENTS:
                _object_start(char)
                if self._early or self._are_complete:
                    raise Malformed
                if self._name:
                    self._begin()
        if member in _ARGUMENTS and self._has_begun:
            self._sink.arguments(char)
        elif member in _ARGUMENTS or member == "name":
            self._value.append(char)
            if member == "name":
                self._sink.verify_begins_name("".join(self._value))

    def end(self) -> None:
        """The object is complete."""
        self._end_member()
        if not self._name:
            raise Malformed
        if not self._has_begun:  # a function without parameters
            self._begin()
            self._sink.arguments("{}")
            self._sink.close()

    def _verify_order(self, member: str) -> None:
        if member not in (_ARGUMENTS if self._name else ("name",)):
            raise Malformed

    def _end_member(self) -> None:
        text = "".join(self._value)
        self._value.clear()
        if self._member == "name":
            name = json.loads(text)
            if self._name or not isinstance(name, str):
                raise Malformed
            self._sink.verify_name(name)
            self._name = name
            if self._early:
                self._begin()
                self._sink.arguments(self._early)
                self._finish_arguments()
        elif self._member in _ARGUMENTS:
            if self._has_begun:
                self._finish_arguments()
            else:
                self._early = text

    def _begin(self) -> None:
        self._sink.begin(self._name)
        self._has_begun = True

    def _finish_arguments(self) -> None:
        self._are_complete = True
        self._sink.close()


def read_calls(sink: Sink, first: str, *, is_bare: bool = False) -> VoidReader:
    """Read a JSON list of calls, of which the first character was taken; see read_call."""
    if first != "[":
        raise Malformed
    char = yield from read_space()
    while True:
        yield from read_call(sink, char, is_bare=is_bare)
        sink.end()
        char = yield from read_space()
        if char == "]":
            return
        if char != ",":
            raise Malformed
        sink.head()
        char = yield from read_space()


def read_text(tag: str, tell: Callable[[str], None], *, has_own_lines: bool) -> VoidReader:
    """Read text up to a tag, whose "<" is the only one in it, and tell it as it comes.

    With `has_own_lines` a line break before the text and one after it belong to the tags.
    """
    border = "\n" if has_own_lines else ""
    held = ""  # the line break, and what may be the tag
    char = yield
    if char == border:
        char = yield
    while True:
        held += char
        rest = held.removeprefix(border)
        if rest == tag:
            return
        if not tag.startswith(rest):
            kept = char if char in (border, tag[0]) else ""  # which may begin the end anew
            tell(held[: len(held) - len(kept)])
            held = kept
        char = yield


def _object_start(char: str) -> str:
    if char != "{":
        raise Malformed
    return char
