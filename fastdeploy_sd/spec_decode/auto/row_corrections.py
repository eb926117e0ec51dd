"""How much longer steps take than was measured, by how many rows they have, against the machine's speed as a whole."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

import numpy as np

from fastdeploy_sd.spec_decode.auto.company_cost import F64

# The speed follows at this rate, and what was seen of so many rows against it; that of the first steps counts for more.
_SPEED_RATE, _RATE, _FIRST_RATE = 0.1, 0.02, 0.33
_MOST_LOG = math.log(2.0)
# More rows than any step had lately are believed to take so much of what was measured. On a large model that was once,
# or never, and is off by as much; too high, such steps would never be run, and nobody would find out.
_HOPE_LOG = math.log(0.85)
# A step is remembered as this much less with every later one, and forgotten when less is left; so much counts at most.
_MEMORY, _FORGOTTEN, _MOST_STEPS = 0.998, 0.25, 64.0
# A step that changed a correction by a rate above this is news.
_NEWS_RATE = 0.04


class RowCorrections:
    """Follows steps by 1, 2, 4, .. rows, interpolated between them.

    What all steps have in common is the machine's speed; corrections say where some differ. Where nothing was seen they
    are those of the nearest rows. How much is hoped of rows falls with the steps seen that had as many or more: in
    doubt what is unknown is tried, as upper confidence bounds do.

    Source: Auer, Cesa-Bianchi and Fischer, Finite-time Analysis of the Multiarmed Bandit Problem, 2002.

    Args:
        max_num_rows: of a step.

    Attributes:
        speed: how long steps take against what was measured.
    """

    def __init__(self, max_num_rows: int) -> None:
        self.speed = 1.0
        self._where = np.log2(np.maximum(np.arange(max_num_rows + 1, dtype=np.float64), 1.0))
        count = max(1, max_num_rows.bit_length())
        # Logarithms of corrections, what was hoped beside them when they were asked for, and how many steps were seen:
        # lists, as arrays so short take longer.
        self._logs, self._hopes, self._num_steps = [0.0] * count, [0.0] * count, [0.0] * count

    def observe(self, num_rows: int, ratio: float) -> bool:
        """A step took `ratio` times as long as was to be expected; returns whether it was of a rare kind, and news."""
        below, above = num_rows.bit_length() - 1, 0.0
        if below + 1 < len(self._logs):
            above = math.log2(num_rows) - below
        parts = [(below, 1.0 - above)]
        if above > 0.0:
            parts.append((below + 1, above))
        # What was hoped for has no part in what was expected.
        log = math.log(ratio) + sum([share * self._hopes[octave] for octave, share in parts])
        logs = self._logs
        is_news = False
        if min([self._num_steps[octave] for octave, _ in parts]) <= _FORGOTTEN:
            logs = self._logs = self._known()
        num_steps = self._num_steps = [_MEMORY * n for n in self._num_steps]
        for octave, share in parts:
            rate = share * max(_RATE, _FIRST_RATE / (1.0 + num_steps[octave]))
            is_news = is_news or rate > _NEWS_RATE
            logs[octave] += rate * log
            num_steps[octave] = min(num_steps[octave] + share, _MOST_STEPS)
        common = sum(map(mul, num_steps, logs)) / sum(num_steps)
        self._logs = [min(max(log - common, -_MOST_LOG), _MOST_LOG) for log in logs]
        self.speed *= math.exp(_SPEED_RATE * log + common)
        return is_news

    def by_rows(self) -> F64:
        """Return f64[max_num_rows + 1]: what times are to be multiplied by, the speed left out.

        Steps are taken to be observed against the latest of these.
        """
        num_as_large = list(accumulate(reversed(self._num_steps)))[::-1]
        self._hopes = [_HOPE_LOG / (1.0 + n) - _HOPE_LOG / (1.0 + num_as_large[0]) for n in num_as_large]
        believed = np.add(self._known(), self._hopes)
        found: F64 = np.exp(np.interp(self._where, np.arange(len(believed)), believed))
        return found

    def _known(self) -> list[float]:
        """Return logarithms of corrections, by octave; where nothing was seen lately, those of the nearest."""
        seen = [octave for octave, n in enumerate(self._num_steps) if n > _FORGOTTEN]
        if not seen:
            return list(self._logs)
        found: list[float] = np.interp(np.arange(len(self._logs)), seen, [self._logs[o] for o in seen]).tolist()
        return found
