"""Finds calls in a text that comes in pieces: the part that all formats share.

A generator reads a format character by character and tells a `Sink` what it finds. What it has taken without telling
anything yet is kept, and is content if the text turns out to be no call:

    content <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
           |============= kept ==================|       |== closes ===|
                                                 |=======| told as it comes

A call begins with its known name and its arguments, and stays a call if its text breaks off. One that repeats an
earlier one ends the answer and is not told: it is held back as long as it may become one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence

from fastdeploy_sd.text.answer_parts import AnswerPart, Content, ToolCallDelta
from fastdeploy_sd.text.tool_calls.json_scan import WHITESPACE, Malformed
from fastdeploy_sd.text.tool_calls.repeats import CallHistory

Reader = Generator[None, str, None]
# Text is taken in pieces of so many characters: each opening looks through what is left of its piece.
_PIECE_CHARS = 1024


class Repeated(Exception):  # noqa: N818 - a verdict about a text, not a failure
    """A call is complete that equals an earlier one of its answer."""


class Sink:
    """Collects what a reader finds; `kept` is text of a call that has not begun, or closes one (`is_closing`)."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self.num_calls = 0
        self._name: str | None = None
        self._arguments: list[str] = []
        self._parts: list[AnswerPart] = []
        self._history = CallHistory()
        self.kept: list[str] = []
        self.is_closing = False

    def head(self, text: str = "") -> None:
        """Whether the text kept so far, followed by this text, may be the beginning of a call."""
        self.kept.append(text)
        self.is_closing = False

    def verify_name(self, name: str) -> None:
        """Make sure that there is a function of this name; raises Malformed."""
        if name not in self._names:
            raise Malformed

    def verify_begins_name(self, text: str) -> None:
        """Make sure that the JSON text of a function's name may begin like this; raises Malformed."""
        if not any(f'"{name}"'.startswith(text) for name in self._names):
            raise Malformed

    def begin(self, name: str) -> None:
        """A call begins; its name is verified."""
        self._flush()
        self._history.begin(name)
        self.num_calls += 1
        self._name = name
        self.kept.clear()

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that has begun."""
        self._arguments.append(text)
        self._history.add(text)
        self.kept.clear()

    def close(self) -> None:
        """The arguments are complete; raises Repeated where the call equals an earlier one, which is then forgotten."""
        self.is_closing = True
        if self._history.close():
            self._name = None
            self._arguments.clear()
            raise Repeated

    def end(self) -> None:
        """The call is closed; what follows may be anything."""
        self.kept.clear()

    def take(self, *, is_end: bool = False) -> list[AnswerPart]:
        """Return what was found since the last time; at the end an incomplete call stays so."""
        if is_end or not self._history.may_repeat:
            self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _flush(self) -> None:
        if self._name is not None or self._arguments:
            self._parts.append(ToolCallDelta(self.num_calls - 1, self._name, "".join(self._arguments)))
            self._name = None
            self._arguments.clear()


class Scanner:
    """Finds calls in what the model says; the state of one answer, which `is_over` where a call equals an earlier one.

    White space before a call is part of its format, and so is what ends the text after one.
    """

    def __init__(
        self,
        openings: Sequence[str],
        read: Callable[[Sink, str], Reader],
        names: Collection[str],
        only_first: Collection[str] = (),
        *,
        ends_after_calls: bool = False,
    ) -> None:
        self._openings = tuple(openings)
        self._only_first = frozenset(only_first)
        self._ends_after_calls = ends_after_calls
        # Each proper beginning of an opening -> whether it may stand anywhere.
        self._beginnings: dict[str, bool] = {}
        for opening in openings:
            for n in range(1, len(opening)):
                is_anywhere = self._beginnings.get(opening[:n], False)
                self._beginnings[opening[:n]] = is_anywhere or opening not in self._only_first
        self._longest = max(map(len, openings))
        self._read = read
        self._sink = Sink(names)
        self._reader: Reader | None = None
        # Held back outside of calls: white space, and after it what may be the beginning of an opening.
        self._space: list[str] = []
        self._begun = ""
        self._follows_content = False
        self._follows_call = False
        self.is_over = False

    def push(self, text: str) -> list[AnswerPart]:
        """Take more text; return the content and calls that became certain, in order. Linear in the text."""
        parts: list[AnswerPart] = []
        for begin in range(0, len(text), _PIECE_CHARS):
            self._take(text[begin : begin + _PIECE_CHARS], parts)
        return parts

    def _take(self, text: str, parts: list[AnswerPart]) -> None:
        position = 0
        while position < len(text) and not self.is_over:
            step = self._search if self._reader is None else self._feed
            position = step(text, position, parts)

    def finish(self) -> list[AnswerPart]:
        """Return what was held back at the end of the text."""
        parts: list[AnswerPart] = []
        if self.is_over:
            return parts
        if self._reader is not None:
            self._reader = None
            parts += self._sink.take(is_end=True)
            if self._sink.is_closing:
                self._follows_call = True
            else:
                self._begun = "".join(self._sink.kept)
        if self._begun or not self._follows_call:
            self._say("".join((*self._space, self._begun)), parts)
        self._space, self._begun = [], ""
        return parts

    def _search(self, text: str, start: int, parts: list[AnswerPart]) -> int:
        """Take text outside of calls up to the next opening; return the position after it."""
        total = self._begun + text[start:]
        place, opening = self._find(total) or (len(total) - self._num_begun(total), "")
        content = total[:place].rstrip(WHITESPACE)
        if content:
            self._say("".join((*self._space, content)), parts)
            self._space.clear()
        self._space.append(total[len(content) : place])
        self._begun = total[place:] if not opening else ""
        if not opening:
            return len(text)
        self._sink.kept = self._space
        self._space = []
        self._sink.head(opening)
        self._reader = self._read(self._sink, opening)
        next(self._reader)
        return len(text) - (len(total) - place - len(opening))

    def _feed(self, text: str, start: int, parts: list[AnswerPart]) -> int:
        """Let the reader take text; return the position after what it took."""
        reader, sink = self._reader, self._sink
        assert reader is not None
        position = start
        try:
            for char in text[start:] if start else text:
                sink.kept.append(char)
                position += 1
                reader.send(char)
        except Repeated:
            parts += sink.take()
            self._reader, self.is_over = None, True
        except StopIteration:
            parts += sink.take()
            self._reader, self._follows_call, self._follows_content = None, True, False
        except Malformed:
            parts += sink.take(is_end=True)
            self._reader = None
            self._give_up("".join(sink.kept), parts)
        else:
            parts += sink.take()
        return position

    def _give_up(self, kept: str, parts: list[AnswerPart]) -> None:
        """What was kept is no call, but its end may be the beginning of one."""
        self._follows_call = self._sink.is_closing
        num_begun = self._num_begun(kept)
        self._begun = kept[len(kept) - num_begun :]
        self._say(kept[: len(kept) - num_begun], parts)

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the first opening and its place."""
        found = [(place, opening) for opening in self._openings if (place := text.find(opening)) >= 0]
        return min((f for f in found if f[1] not in self._only_first or self._is_first(text[: f[0]])), default=None)

    def _num_begun(self, text: str) -> int:
        """Return the length of the longest end of a text that is the beginning of an opening."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        for n in lengths:
            is_anywhere = self._beginnings.get(text[len(text) - n :])
            if is_anywhere or (is_anywhere is not None and self._is_first(text[: len(text) - n])):
                return n
        return 0

    def _is_first(self, before: str) -> bool:
        """Whether what follows this text, which follows what has been told, is before all content or after a call."""
        return not (self._follows_content or before.strip(WHITESPACE))

    def _say(self, text: str, parts: list[AnswerPart]) -> None:
        if text and self._ends_after_calls and self._sink.num_calls:
            self.is_over = True
        elif text:
            parts.append(Content(text))
            self._follows_content, self._follows_call = True, False
