"""Tunable numbers of kernels, and the search for a value that is clearly the fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_NUM_ROUNDS = 6
# A machine is busy if its median round takes this multiple of the fastest one.
_DISTURBED = 1.25


@dataclass(frozen=True, slots=True)
class Tunable:
    """A number of a kernel. No bit of any result depends on it.

    Attributes:
        key: its name in files.
        values: the allowed ones; the first leaves the choice to the kernel.
        gain: the factor by which another value must be faster than the first, > 1.
        num_rows: of the products that it is measured with.
        alike: keys of other numbers that have the same value during its measurement.
        after: keys of other numbers that were measured before, and keep their values during its measurement.
    """

    key: str
    values: tuple[int, ...]
    gain: float
    num_rows: int
    alike: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def measured(tunable: Tunable, use: Callable[[int], object], run: Callable[[], object]) -> tuple[int, bool]:
    """Return the value that is clearly the fastest, and whether the machine was quiet.

    On a busy machine it is the first value: the best one then depends on the other programs.

    Args:
        use: makes the kernel use a value.
        run: runs the kernel.
    """
    times = take_turns(tunable.values, use, run)
    if not was_quiet(times[tunable.values[0]]):
        return tunable.values[0], False
    return clearly_best(times, tunable.values[0], tunable.gain), True


def take_turns(
    values: Sequence[int], use: Callable[[int], object], run: Callable[[], object]
) -> dict[int, list[float]]:
    """Return value -> seconds of each round."""
    times: dict[int, list[float]] = {value: [] for value in values}
    for _ in range(_NUM_ROUNDS):
        for value, seconds in times.items():
            use(value)
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return times


def clearly_best(times: Mapping[int, Sequence[float]], default: int, gain: float) -> int:
    """Return the value with the least time.

    The default where that may be chance: the other must be faster at the median, in the even and in the odd rounds.
    """
    best = min(times, key=lambda value: min(times[value]))
    halves = (slice(0, None, 2), slice(1, None, 2))
    is_better = all(min(times[best][half]) * gain < min(times[default][half]) for half in halves)
    return best if is_better and median(times[best]) < median(times[default]) else default


def was_quiet(seconds: Sequence[float]) -> bool:
    """Whether the machine did nothing else during these rounds of one value."""
    return median(seconds) < _DISTURBED * min(seconds)
