"""What the next step takes with so many drafts in it: measured times, interpolated, kept true online.

    T(rows, requests, KV tokens) = curve(rows) * shape(rows, requests)
                                 + slope(requests) * (KV tokens + share(requests) * those read by drafts)

each part corrected by what steps take. A draft reads the context of its request again, out of nearer caches.

Only how times compare matters to a decision: a machine that became slower as a whole changes none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.auto.company_cost import F64, CompanyShape, ContextCost
from fastdeploy_sd.spec_decode.auto.row_corrections import RowCorrections
from fastdeploy_sd.spec_decode.auto.step_slope import SlopeOfSteps
from fastdeploy_sd.spec_decode.auto_profile import CostProfile, StepSample

# Drafts in a step at most; a step with more is not worth it on any machine.
MAX_STEP_DRAFTS = 512
# So many steps are observed before their times change what is expected of others, unless they are of a rare kind.
_REFRESH_STEPS = 64
# One step says at most this much: what interrupts it says nothing of it, and interrupts long steps most often.
_MAX_STEP_RATIO = 1.25


class DraftTimes(NamedTuple):
    """What a step takes with 0, 1, .. drafts in it beside everything else, in any unit:

        curve[num_rows + d] + fixed + d * per_draft, and any_draft more where d > 0

    Attributes:
        curve: f64[N], by rows of a step, at most N - 1; rising from num_rows on. Not to be written to.
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
        max_num_rows: of a step, drafts included.
    """

    def __init__(self, profile: CostProfile, max_num_rows: int) -> None:
        self._max_num_rows = max_num_rows
        self._rows = np.arange(max_num_rows + 1, dtype=np.float64)
        short = min(sample.context for sample in profile.steps if (sample.rows, sample.requests) == (1, 1))
        alone = [s for s in profile.steps if s.requests == 1 and s.context <= short]
        longest = max(s.rows for s in alone)
        prompts = [s for s in profile.steps if s.requests == 0 and s.rows > longest]
        # Of a prompt's rows one chooses a token, so as many of a request and its drafts take no less.
        own, at_least = (self._interpolated(steps) for steps in (alone, alone + prompts))
        self._curve = _rising(np.maximum(own, at_least))
        self._contexts = ContextCost(profile.steps, short)
        self._shape = CompanyShape(profile.steps, self._curve, self._contexts)
        self._corrections = RowCorrections(max_num_rows)
        self._corrected = self._curve
        self._more_share = SlopeOfSteps()  # what drafts read besides what was measured
        self._num_observed = 0
        self._tables: dict[int, F64] = {}

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        """See StepTimes.times; in ms of the machine as it was measured."""
        rows = min(num_rows, self._max_num_rows)
        kv_ms = self._contexts.ms(num_requests, num_kv_tokens)
        per_draft = self._share(num_requests) * kv_ms / max(num_requests, 1)
        return DraftTimes(self._table(num_requests), rows, kv_ms, per_draft)

    def observe(self, num_rows: int, num_requests: int, num_kv_tokens: int, ms: float) -> None:
        """A step of this kind took `ms`.

        A step is believed up to a factor of 1.25, so that several agree before much changes.
        """
        more = self._more_share
        read_ms = self._read_ms(num_rows, num_requests, num_kv_tokens)
        expected = self.expected(num_rows, num_requests, num_kv_tokens)
        measured = expected + (self._contexts.share(num_requests) - self._share(num_requests)) * read_ms
        ratio = min(max(ms / (expected * self.speed), 1 / _MAX_STEP_RATIO), _MAX_STEP_RATIO)
        more.observe(ratio * self.speed * expected / measured, read_ms / measured)
        is_news = self._corrections.observe(self._row(num_rows), ratio)
        self._num_observed += 1
        if is_news or self._num_observed % _REFRESH_STEPS == 0:
            self._tables.clear()
            self._corrected = self._curve * self._corrections.by_rows()

    def expected(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> float:
        """What a step of this kind takes, in ms of the machine as it was measured."""
        kv_ms = self._contexts.ms(num_requests, num_kv_tokens)
        read_ms = self._read_ms(num_rows, num_requests, num_kv_tokens)
        return self._table(num_requests).item(self._row(num_rows)) + kv_ms + self._share(num_requests) * read_ms

    def _interpolated(self, steps: Sequence[StepSample]) -> F64:
        return _interpolated([s.rows for s in steps], [s.ms for s in steps], self._rows)

    def _row(self, num_rows: int) -> int:
        return min(max(num_rows, 1), self._max_num_rows)

    def _read_ms(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> float:
        """What drafts would take to read contexts, if each took what its request's own token does."""
        return (num_rows - num_requests) * self._contexts.ms(num_requests, num_kv_tokens) / max(num_requests, 1)

    @property
    def speed(self) -> float:
        """How long steps take against when the profile was measured: 1.7 = they take 1.7 times as long."""
        return self._corrections.speed

    def _share(self, num_requests: int) -> float:
        """What a draft takes to read its request's context, over what the request's own token does."""
        return max(0.0, self._contexts.share(num_requests) + self._more_share.value)

    def _table(self, num_requests: int) -> F64:
        """f64[max_num_rows + 1]: the time of every number of rows of so many requests, at the shortest context."""
        table = self._tables.get(num_requests)
        if table is None:
            table = self._tables[num_requests] = _rising(self._corrected * self._shape.at(num_requests))
        return table


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


def _rising(times: F64) -> F64:
    """More rows never take less: what was measured so was noise."""
    found: F64 = np.maximum.accumulate(times)
    return found
