"""Finds stop strings in text that arrives token by token, and holds back what might become one. Knows no token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.errors import shown
from fastdeploy_sd.types import FinishReason


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended the text.

    Attributes:
        stop: the stop string as the user wrote it, None = something else did, which `cause` names.
    """

    stop: str | None
    cause: str = ""
    finish_reason: FinishReason = FinishReason.STOP

    @property
    def described(self) -> str:
        """For messages."""
        return self.cause if self.stop is None else shown(self.stop)


REPEATED_CALL = StopMatch(None, "a repeated call")
LINE_LIMIT = StopMatch(None, "a line that ends it", FinishReason.LENGTH)


class _Automaton:
    """Longest prefix of one pattern that is a suffix of the text so far (Knuth-Morris-Pratt)."""

    __slots__ = ("_fail", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._fail = [0] * len(pattern)
        for i in range(1, len(pattern)):
            self._fail[i] = self._step(self._fail[i - 1], pattern[i])

    def _step(self, state: int, char: str) -> int:
        while state and self.pattern[state] != char:
            state = self._fail[state - 1]
        return state + 1 if self.pattern[state] == char else 0

    def first_end(self, text: str, can_match: bool) -> int | None:
        """Advance over `text`; return the end of the first match in it. Without `can_match` matches are passed over."""
        for i, char in enumerate(text):
            self.state = self._step(self.state, char)
            if self.state == len(self.pattern):
                if can_match:
                    return i + 1
                self.state = self._fail[self.state - 1]
        return None


class StopStrings:
    """The stop strings of one sequence; the match that completes first wins, of several the longest."""

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._automata = [_Automaton(s) for s in stop]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, can_match: bool) -> tuple[str, StopMatch | None]:
        """Take the text of the next token; return what may be shown now, and the match if this token completed one.

        |  held  |    text    |     held: the longest end of earlier text that could start a stop string
             |=====stop=====|       match: everything before it is emitted, nothing after it ever

        `can_match`: False while min_tokens is not reached: a stop string completed meanwhile is ordinary text.
        """
        if not self._automata:
            return text, None
        total = self._held + text
        ends = [(end, -len(a.pattern), a) for a in self._automata if (end := a.first_end(text, can_match)) is not None]
        if ends:
            end, _, automaton = min(ends, key=lambda e: e[:2])
            end += len(self._held)
            self._held = ""
            return total[: end if self._include else end - len(automaton.pattern)], StopMatch(automaton.pattern)
        num_held = 0 if self._include else max(a.state for a in self._automata)
        split = len(total) - num_held
        self._held = total[split:]
        return total[:split], None

    def finish(self) -> str:
        """Return what was held back: the text ended without completing it."""
        held, self._held = self._held, ""
        return held
