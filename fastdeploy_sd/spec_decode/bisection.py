"""Finds the rows on which a computation fails, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """Rows begin .. end - 1 and their result; a failed row is alone, with what it raised."""

    begin: int
    end: int
    result: T | None
    error: Exception | None = None


def run_in_parts(run: Callable[[int, int], T], begin: int, end: int) -> list[Part[T]]:
    """Run a computation over rows begin .. end - 1; where that raises, over the halves, down to single rows.

    With f failing rows among n, that is at most about 2 f log2(n) runs. Where only too many rows at once fail, as for
    lack of memory, smaller parts succeed.

    Args:
        run: (begin, end) -> result. It changes nothing if it raises. A row's result does not depend on the other rows,
            and stays valid after later runs.
    """
    if begin == end:
        return []
    try:
        return [Part(begin, end, run(begin, end))]
    except Exception as error:
        if end - begin == 1:
            return [Part(begin, end, None, error)]
    middle = (begin + end) // 2
    return run_in_parts(run, begin, middle) + run_in_parts(run, middle, end)
