"""Which of several ways to do the same is clearly the quickest on this machine, when they take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")

# A machine on which the same takes so much longer at the median does something else besides.
_DISTURBED = 1.25


def take_turns(choices: Sequence[T], num_rounds: int, run: Callable[[T], object]) -> dict[T, list[float]]:
    """Return choice -> seconds of each round."""
    times: dict[T, list[float]] = {choice: [] for choice in choices}
    for _ in range(num_rounds):
        for choice, seconds in times.items():
            begin = time.perf_counter()
            run(choice)
            seconds.append(time.perf_counter() - begin)
    return times


def clearly_best(times: Mapping[T, Sequence[float]], own: T, gain: float) -> T:
    """Return the choice with the least time; `own` where that is not better at the median, and both in the even and in
    the odd rounds, as it may have been chance.

    Args:
        times: choice -> seconds of each round, at least two; `own` among them.
        gain: by how much another must be better, > 1.
    """
    best = min(times, key=lambda choice: min(times[choice]))
    halves = (slice(0, None, 2), slice(1, None, 2))
    is_better = all(min(times[best][half]) * gain < min(times[own][half]) for half in halves)
    return best if is_better and median(times[best]) < median(times[own]) else own


def quiet_best(times: Mapping[T, Sequence[float]], own: T, gain: float) -> tuple[T, bool]:
    """Return the choice that is clearly best, and whether the machine was quiet; `own` where it was not.

    What seemed best then was best for whatever ran beside it. Arguments are those of `clearly_best`.
    """
    return (clearly_best(times, own, gain), True) if was_quiet(times[own]) else (own, False)


def was_quiet(seconds: Sequence[float]) -> bool:
    """Whether the machine did nothing else during these rounds of one choice."""
    return median(seconds) < _DISTURBED * min(seconds)
