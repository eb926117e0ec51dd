"""What the next step takes with so many drafts in it: measured times, interpolated, kept true online.

What was measured is worked out here; what steps say of it since is followed by the kernel library. See
custom_ops/cpu/drafters/step_cost.h.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, library
from fastdeploy_sd.device.program.bound_call import BoundCall
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.batch_scaling import F64, BatchScaling, ContextCost
from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample

# Drafts in a step at most; a step with more is not worth it on any machine.
MAX_STEP_DRAFTS = 512


class DraftTimes(NamedTuple):
    """What a step takes with 0, 1, .. drafts in it beside everything else, in any unit:

        curve[num_rows + d] + fixed + d * per_draft, and any_draft more where d > 0

    Attributes:
        curve: f64[N], by rows of a step, at most N - 1; rising from num_rows on. Not to be written to; whoever made it
            may do so after a step.
        num_rows: of the step without drafts, < N.
        fixed: what every step takes besides; > -curve[num_rows].
        per_draft: what each draft does, >= 0.
        any_draft: what a step does that has any, >= 0.
    """

    curve: F64
    num_rows: int
    fixed: float
    per_draft: float = 0.0
    any_draft: float = 0.0

    def array(self, max_drafts: int) -> F64:
        """Return f64[n], 1 <= n <= max_drafts + 1, > 0."""
        found = self.curve[self.num_rows : self.num_rows + min(max_drafts, MAX_STEP_DRAFTS) + 1] + self.fixed
        drafts = np.arange(len(found))
        times: F64 = found + self.per_draft * drafts + self.any_draft * (drafts > 0)
        return times


class StepTimes(Protocol):
    """What steps take, in any unit."""

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """Return the time of a step by its drafts.

        Args:
            num_rows: tokens of the step without drafts: one of each request, and parts of prompts.
            num_requests: that get a token.
            num_kv_tokens: in the contexts of all of them.
        """
        ...


class LinearCost:
    """T(1 + d) = 1 + cost * d, whatever else is in the step.

    Raises:
        ConfigError: the cost is negative or not finite.
    """

    def __init__(self, cost: float) -> None:
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(f"cost: expected a number of at least 0, got {cost}", param="cost")
        self._cost = cost
        self._curve = self._up_to(1)

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """See StepTimes.times."""
        if num_rows + MAX_STEP_DRAFTS >= len(self._curve):
            self._curve = self._up_to(2 * num_rows)
        return DraftTimes(self._curve, num_rows, 1.0)

    def _up_to(self, num_rows: int) -> F64:
        return self._cost * np.arange(-1, num_rows + MAX_STEP_DRAFTS, dtype=np.float64)


class CostModel:
    """Times in between those of a profile, and what later steps say about them.

    Between measured row counts the time is interpolated, so a stair is found where it was measured; beyond them it
    grows as `_interpolated` says.

    Args:
        profile: measured on this machine.
        max_num_rows: of a step, drafts included; at least 1.

    Attributes:
        handle: of the native object.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, profile: CostProfile, max_num_rows: int) -> None:
        self._native = _NativeCost(profile, max_num_rows)
        self.handle = self._native.handle
        self._curves: dict[int, F64] = {}  # by address
        self._times: Any = struct_type("PolicyTimesParams")()
        self._outcome = np.ones(2, np.float64)
        params = struct_type("StepCostParams")(
            cost=self.handle, times=ctypes.addressof(self._times), outcome=address(self._outcome)
        )
        self._params: Any = params
        self._run_times, self._run_expected, self._run_observe = (
            BoundCall(f"step_cost_{op}", params).run for op in ("times", "expected", "observe")
        )

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """See StepTimes.times; in ms of the machine as it was measured.

        Row counts that few steps had get an optimistic time, so that they are tried.
        """
        self._name_step(num_rows, num_requests, num_kv_tokens)
        self._run_times()
        found = self._times
        curve = self._curves.get(found.curve)
        if curve is None:
            curve = self._curves[found.curve] = self._native.curve_at(found.curve, found.num_times)
        return DraftTimes(curve, found.num_step_rows, found.fixed, found.per_draft)

    def observe(self, num_rows: int, num_requests: int, num_kv_tokens: int, ms: float) -> None:
        """A step of this kind took `ms`.

        One step counts up to a factor of 1.25 of the optimistic time, so that several must agree.

        Raises:
            ValueError: `ms` is not finite.
        """
        self._name_step(num_rows, num_requests, num_kv_tokens)
        self._params.ms = ms
        self._run_observe()

    def expected(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> float:
        """What a step of this kind takes as far as is known, in ms of the machine as it was measured."""
        self._name_step(num_rows, num_requests, num_kv_tokens)
        self._run_expected()
        return self._outcome.item(0)

    @property
    def speed(self) -> float:
        """How long steps take against when the profile was measured: 1.7 = they take 1.7 times as long."""
        return self._outcome.item(1)

    def _name_step(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> None:
        p = self._params
        p.num_rows, p.num_requests, p.num_kv_tokens = num_rows, num_requests, num_kv_tokens


class _NativeCost:
    """The native object. Whoever has a curve of it keeps it alive."""

    def __init__(self, profile: CostProfile, max_num_rows: int) -> None:
        short = min(sample.context for sample in profile.steps if (sample.rows, sample.requests) == (1, 1))
        curve = _single_request_curve(profile.steps, short, max_num_rows)
        contexts = ContextCost(profile.steps, short)
        batches = BatchScaling(profile.steps, curve, contexts)
        slopes, shares = contexts.slopes, contexts.shares
        self.handle = ctypes.c_void_p()
        params = struct_type("StepCostCreateParams")(
            num_times=len(curve),
            curve=curve.ctypes.data,
            num_shapes=len(batches.numbers),
            shape_counts=batches.numbers.ctypes.data,
            shapes=batches.ratios.ctypes.data,
            short_context=short,
            num_slopes=len(slopes.numbers),
            slope_counts=slopes.numbers.ctypes.data,
            slopes=slopes.values.ctypes.data,
            num_shares=len(shares.numbers),
            share_counts=shares.numbers.ctypes.data,
            shares=shares.values.ctypes.data,
            cost=ctypes.addressof(self.handle),
        )
        call("step_cost_create", params)
        weakref.finalize(self, library().fdsd_step_cost_destroy, self.handle)

    def curve_at(self, where: int, num_times: int) -> F64:
        """Return the native f64[num_times] at this address."""
        memory: Any = (ctypes.c_double * num_times).from_address(where)
        memory.owner = self
        curve: F64 = np.frombuffer(memory, np.float64)
        return curve


def _single_request_curve(steps: Sequence[StepSample], short: int, max_num_rows: int) -> F64:
    """Return f64[max_num_rows + 1]: what a step of one request takes by its rows, at the shortest context."""
    alone = [s for s in steps if s.requests == 1 and s.context <= short]
    longest = max(s.rows for s in alone)
    prompts = [s for s in steps if s.requests == 0 and s.rows > longest]
    wanted = np.arange(max_num_rows + 1, dtype=np.float64)
    # Of a prompt's rows one chooses a token, so as many of a request and its drafts take no less.
    own, at_least = (
        _interpolated([s.rows for s in found], [s.ms for s in found], wanted) for found in (alone, alone + prompts)
    )
    # More rows never take less: what was measured so was noise.
    curve: F64 = np.maximum.accumulate(np.maximum(own, at_least))
    return curve


def _interpolated(rows: Sequence[int], ms: Sequence[float], wanted: F64) -> F64:
    """Piecewise linear through the points; a single point gives a flat line.

    Beyond the last point R a row takes what one took since R / 2: over fewer rows noise and stairs would decide. It
    takes no more than one of R took: more rows can be run as several steps.
    """
    best: dict[int, float] = {}
    for row, value in zip(rows, ms, strict=True):
        best[row] = min(value, best.get(row, value))
    x = np.array(sorted(best), np.float64)
    y = np.array([best[int(row)] for row in x], np.float64)
    found: F64 = np.interp(wanted, x, y)
    if len(x) > 1:
        before = max(int(np.searchsorted(x, x[-1] / 2, side="right")) - 1, 0)
        slope = min(max(0.0, (y[-1] - y[before]) / (x[-1] - x[before])), y[-1] / x[-1])
        found = np.where(wanted > x[-1], y[-1] + slope * (wanted - x[-1]), found)
    return found
