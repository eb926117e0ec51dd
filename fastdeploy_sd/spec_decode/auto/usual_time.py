"""How long something around a step usually takes that does not depend on what is drafted in it."""

from __future__ import annotations

from collections import deque
from statistics import median

# The latest times of a class, of which the median counts: one in which something else ran says nothing.
_NUM_KEPT = 15
_TIMES_PER_MEDIAN = 5


class UsualTime:
    """Median seconds, by number of requests in classes of a factor of two."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._latest = 0.0
        self._num_observed = 0

    def observe(self, num_requests: int, seconds: float) -> None:
        """It took so long around a step of so many requests."""
        number = num_requests.bit_length()
        kept = self._kept.get(number)
        if kept is None:
            kept = self._kept[number] = deque(maxlen=_NUM_KEPT)
        kept.append(seconds)
        self._num_observed += 1
        if number not in self._medians or self._num_observed % _TIMES_PER_MEDIAN == 0:
            self._latest = self._medians[number] = median(kept)

    def seconds(self, num_requests: int) -> float:
        """Return what is to be expected; of another class where this one has not been seen, 0 where none has."""
        return self._medians.get(num_requests.bit_length(), self._latest)
