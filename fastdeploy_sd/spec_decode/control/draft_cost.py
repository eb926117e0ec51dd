"""What it takes to ask a source that runs a model, and when one that was not worth it is tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.spec_decode.control.profile import DraftSample

# Steps in which a source that was found not worth its time is tried, and after how many steps for the first time.
_TRIAL_STEPS, _FIRST_PAUSE, _LONGEST_PAUSE = 4, 64, 4096
# One call says at most so much of those to come, and they are followed at this rate: as for steps, see CostModel.
_MAX_RATIO, _RATE = 1.25, 0.1
# Where nothing was measured, in one-row steps: of a call, of each of its rows; of each further pass, and its rows.
_UNMEASURED = (0.2, 0.02, 0.1, 0.02)


class CallTimes(NamedTuple):
    """A call for k drafts of each of n rows takes first + row * n + (k - 1) * (pass_ + pass_row * n)."""

    first: float
    row: float
    pass_: float
    pass_row: float

    def of(self, num_rows: int, num_passes: int) -> float:
        """The time of a call for so many rows, of which the longest gets so many drafts."""
        return self.first + self.row * num_rows + max(num_passes - 1, 0) * (self.pass_ + self.pass_row * num_rows)


class DraftCost:
    """Times of calls between those of a profile, and what later calls say about them."""

    def __init__(self) -> None:
        self._found = CallTimes(*_UNMEASURED)
        self._ratio, self._is_measured = 1.0, False

    def take(self, samples: Sequence[DraftSample]) -> None:
        """These calls were measured: the unit is milliseconds from here on. Without any nothing changes."""
        if not samples:
            return
        n = np.array([sample.requests for sample in samples], np.float64)
        more = np.array([sample.drafts - 1 for sample in samples], np.float64)
        # A call for less takes no longer than one for more: what was measured so was disturbed.
        ms = np.array(
            [min(s.ms for s in samples if s.requests >= of.requests and s.drafts >= of.drafts) for of in samples]
        )
        columns = np.stack([np.ones(len(n)), n, more, more * n], axis=1)
        # The least squares of relative errors.
        found = np.linalg.lstsq(columns / ms[:, None], np.ones(len(n)), rcond=None)[0]
        self._found, self._is_measured = CallTimes(*np.maximum(found, 0.0).tolist()), True

    def observe(self, num_rows: int, num_passes: int, ms: float) -> None:
        """A call took `ms`; rows whose KV it caught up with count as rows."""
        expected = self._found.of(num_rows, num_passes) * self._ratio
        if self._is_measured and expected > 0:
            self._ratio *= min(max(ms / expected, 1 / _MAX_RATIO), _MAX_RATIO) ** _RATE

    def times(self, speed: float) -> CallTimes:
        """Return the times, in the unit of steps on a machine that takes `speed` times as long as measured."""
        return CallTimes(*(time * self._ratio / speed for time in self._found))


class Trials:
    """When a source that is not wanted is tried all the same: not soon, and more rarely each time."""

    def __init__(self) -> None:
        self._pause = self._next_pause = _FIRST_PAUSE
        self._num_left = 0

    def note_wanted(self) -> None:
        """The source is worth its time."""
        self._pause = self._next_pause = _FIRST_PAUSE
        self._num_left = 0

    def is_due(self, num_steps: int) -> bool:
        """The source was not worth its time in so many steps; returns whether it is to be tried nevertheless."""
        if self._num_left > 0:
            self._num_left -= 1
            return True
        self._pause -= num_steps
        if self._pause > 0:
            return False
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._pause, self._num_left = self._next_pause, _TRIAL_STEPS - 1
        return True
