"""Ends a text at the beginning of a line. Knows no token ids and no clock."""

from __future__ import annotations

from dataclasses import dataclass

_BLANK = " \t"


@dataclass(frozen=True, slots=True)
class LineLimits:
    """What ends a text; 0 = nothing does.

    Attributes:
        min_indent: spaces and tabs that each line after the first begins with; an empty line has none.
        max_ms: a line that ends after so many milliseconds is the last one.
    """

    min_indent: int = 0
    max_ms: int = 0


class LineCutter:
    """Finds the end of one text, which arrives in pieces."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._indent: int | None = None  # of the line so far; None = what follows its indentation has begun

    def end_in(self, text: str, elapsed_ms: float, *, can_end: bool) -> int | None:
        """Return where the next piece has to end, None = it goes on. Without `can_end` ends are passed over."""
        is_late = 0 < self._limits.max_ms < elapsed_ms
        for i, char in enumerate(text):
            if self._indent is not None and char not in _BLANK:
                is_short, self._indent = self._indent < self._limits.min_indent, None
                if is_short and can_end:
                    return i
            if char == "\n":
                if is_late and can_end:
                    return i + 1
                self._indent = 0
            elif self._indent is not None:
                self._indent += 1
        return None
