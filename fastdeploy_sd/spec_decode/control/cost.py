"""Times of steps where no server reports them, and times of calls of a model source."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.decision import F64, MAX_STEP_DRAFTS, DraftTimes
from fastdeploy_sd.spec_decode.control.profile import CostProfile, DraftSample
from fastdeploy_sd.types.draft_methods import DraftSource

# The ratio of one call to its expected time counts up to this factor, and with this exponent.
_MAX_RATIO, _RATE = 1.25, 0.1
# Times without a measurement, in one-row steps: of a call, of each of its rows; of each further pass, and its rows.
_UNMEASURED = (0.2, 0.02, 0.1, 0.02)


class StepTimes(Protocol):
    """Times of steps, in any unit."""

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """Return the time of a step by its drafts.

        Args:
            num_rows: tokens of the step without drafts: one of each request, and parts of prompts.
            num_kv_tokens: in the contexts of all requests that get a token.
        """
        ...


class LinearCost:
    """T(1 + d) = 1 + cost * d, for any step; raises ConfigError for a cost that is negative or not finite."""

    def __init__(self, cost: float) -> None:
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(f"cost: expected a number of at least 0, got {cost}", param="cost")
        self._cost = cost
        self._curve = self._up_to(1)

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        if num_rows + MAX_STEP_DRAFTS >= len(self._curve):
            self._curve = self._up_to(2 * num_rows)
        return DraftTimes(self._curve, num_rows, 1.0)

    def _up_to(self, num_rows: int) -> F64:
        return self._cost * np.arange(-1, num_rows + MAX_STEP_DRAFTS, dtype=np.float64)


class CostModel:
    """Measured times, interpolated as in StepCost of custom_ops/cpu/drafters; raises ValueError for a bad number."""

    def __init__(self, profile: CostProfile, max_num_rows: int) -> None:
        self._controller = DraftController(0, 1, (DraftSource.NGRAM,))
        self._controller.take_costs(profile, max_num_rows)
        self._curves: dict[int, F64] = {}  # by address
        self._times: Any = struct_type("ControllerTimesParams")()
        self._outcome = np.ones(2, np.float64)
        self._params: Any = struct_type("ControllerStepCostParams")(
            controller=self._controller.handle, times=ctypes.addressof(self._times), outcome=address(self._outcome)
        )
        self._run_times = BoundCall("controller_times", self._params).run

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """See StepTimes.times; in ms, at the speed of the measurement."""
        self._name_step(num_rows, num_requests, num_kv_tokens)
        self._run_times()
        found = self._times
        curve = self._curves.get(found.curve)
        if curve is None:
            curve = self._curves[found.curve] = self._curve_at(found.curve, found.num_times)
        return DraftTimes(curve, found.num_step_rows, found.fixed, found.per_draft)

    def _name_step(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> None:
        p = self._params
        p.num_rows, p.num_requests, p.num_kv_tokens = num_rows, num_requests, num_kv_tokens

    def _curve_at(self, where: int, num_times: int) -> F64:
        """Return the native f64[num_times] at this address, which keeps the controller alive."""
        memory: Any = (ctypes.c_double * num_times).from_address(where)
        memory.owner = self._controller
        curve: F64 = np.frombuffer(memory, np.float64)
        return curve


class CallTimes(NamedTuple):
    """A call for k drafts of each of n rows takes first + row * n + (k - 1) * (pass_ + pass_row * n).

    Each token whose KV it fills besides takes as long as a row of the first pass.
    """

    first: float
    row: float
    pass_: float
    pass_row: float

    def of(self, num_rows: int, num_passes: int, num_filled: int = 0) -> float:
        """Return the time of a call for so many rows, of which the longest gets `num_passes` drafts."""
        first = self.first + self.row * (num_rows + num_filled)
        return first + max(num_passes - 1, 0) * (self.pass_ + self.pass_row * num_rows)


class DraftCost:
    """Times of calls, interpolated between those of a profile and corrected by later calls."""

    def __init__(self) -> None:
        self._found = CallTimes(*_UNMEASURED)
        self._ratio, self._is_measured = 1.0, False

    def take(self, samples: Sequence[DraftSample]) -> None:
        """Take measured calls, if any: the unit is then milliseconds."""
        if not samples:
            return
        n = np.array([sample.requests for sample in samples], np.float64)
        more = np.array([sample.drafts - 1 for sample in samples], np.float64)
        # A call for less takes no longer than one for more: a longer measured time was disturbed.
        ms = np.array(
            [min(s.ms for s in samples if s.requests >= of.requests and s.drafts >= of.drafts) for of in samples]
        )
        columns = np.stack([np.ones(len(n)), n, more, more * n], axis=1)
        # The least squares of relative errors.
        found = np.linalg.lstsq(columns / ms[:, None], np.ones(len(n)), rcond=None)[0]
        self._found, self._is_measured = CallTimes(*np.maximum(found, 0.0).tolist()), True

    def observe(self, num_rows: int, num_passes: int, ms: float, num_filled: int = 0) -> None:
        """A call took `ms`, and filled the KV of so many tokens besides."""
        expected = self._found.of(num_rows, num_passes, num_filled) * self._ratio
        if self._is_measured and expected > 0:
            self._ratio *= min(max(ms / expected, 1 / _MAX_RATIO), _MAX_RATIO) ** _RATE

    def times(self, speed: float) -> CallTimes:
        """Return the times, in the unit of steps on a machine that takes `speed` times as long as measured."""
        return CallTimes(*(time * self._ratio / speed for time in self._found))
