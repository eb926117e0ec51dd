"""How long something around a step usually takes that does not depend on what is drafted in it."""

from __future__ import annotations

from collections import deque

# The latest times of a class, of which the lower quartile counts: those in which something else ran say nothing, and
# beside busy neighbours these are more than half.
_NUM_KEPT, _QUIET_PART = 15, 0.25
_TIMES_PER_QUARTILE = 5


class UsualTime:
    """The lower quartile of the latest seconds, by number of requests in classes of a factor of two."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[float]] = {}
        self._quartiles: dict[int, float] = {}
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
        if number not in self._quartiles or self._num_observed % _TIMES_PER_QUARTILE == 0:
            self._latest = self._quartiles[number] = sorted(kept)[int(_QUIET_PART * len(kept))]

    def seconds(self, num_requests: int) -> float:
        """Return what is to be expected; of another class where this one has not been seen, 0 where none has."""
        return self._quartiles.get(num_requests.bit_length(), self._latest)
