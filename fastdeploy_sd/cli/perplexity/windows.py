"""Which tokens of a text are scored after which: windows that overlap, so that every scored token has a context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [begin, end) of a text; the scored ones are [first, end)."""

    begin: int
    first: int
    end: int


def windows(num_tokens: int, length: int, stride: int, num_context: int) -> Iterator[Window]:
    """Yield windows of `length` tokens whose ends are `stride` apart; the last one ends with the text.

    A window scores what no window before it has. The first one leaves out its first `num_context` tokens:

        text     [0 ................................. num_tokens)
        windows  [....|####)
                      [....|####)      # scored, `stride` of them
                        [......|##)    the last one scores what is left
    """
    first, end = num_context, length
    while first < num_tokens:
        yield Window(end - length, first, end)
        first, end = end, min(end + stride, num_tokens)
