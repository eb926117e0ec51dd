"""Measures the time of steps and drafting, with synthetic requests on an idle executor, before it serves.

All kinds of steps are measured in turns, for several rounds: a machine's speed changes every second, and only the
ratios of times matter. Knows no engine, no file and no arithmetic of costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fastdeploy_sd.spec_decode.control.profile import DraftSample, StepSample
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.worker.autotune.monotone_fit import Shape, monotone_fit
from fastdeploy_sd.worker.autotune.synthetic_requests import Execute, SyntheticRequests

BUDGET_S = 2.0
_SHORT_CONTEXT, _LONG_CONTEXT, _CHUNK = 64, 1024, 256
# Drafts after the newest token, the most informative first, as the time of some models then runs out: kernels change
# at 4, 8 and 16 rows.
_DRAFTS, _MORE_DRAFTS = (1, 3, 7, 15, 31), (4, 2, 8, 5, 11, 16)
_DRAFTS_IN_BATCH, _MORE_IN_BATCH = (0, 3), (1, 7, 4)
_DRAFTS_IN_LONG = (0, 3)
# The most requests of a batch at a long context.
_BATCH_IN_LONG = 8
# Shorter steps run once unmeasured before: another kind of step leaves cold caches.
_WARM_UP_MS = 10.0
_MODEL_DRAFTS, _OTHER_DRAFTS = (1, 3), (8,)
_NUM_DRAFTERS = 8
_DRAFT_ROUNDS = 5
# A single call does not show the usual time, which decides when a model is asked. Other methods take some 10 us.
_LEAST_MODEL_ROUNDS = 3
# Rounds end when so many in a row brought no kind of step below this factor of its time.
_SETTLED_ROUNDS, _SETTLED = 3, 0.97
# The second fastest step over the fastest, at most, on a quiet machine.
_STEADY = 1.2
# On a quiet machine, at most this share of the kinds of steps takes longer than that over their monotone fit.
_MAX_DISTURBED = 0.2
# Of the budget, at most: filling the long context; one point; everything but drafting.
_CONTEXT_SHARE, _POINT_SHARE, _STEPS_SHARE = 0.25, 0.06, 0.75
# The first rows of the first prompt are not measured: the weights were never read, which tripled the time of 64 rows.
_WARM_UP_ROWS = 16
# The one-row step is measured again when the points after it have taken this multiple of its time.
_BASE_EVERY = 12.0
# A clock that stood still measured no time; a profile holds none that is 0.
_LEAST_MS = 1e-6


class _Point(NamedTuple):
    """A Shape: a kind of step, `rows` of each of `requests` at a context; 0 requests: `rows` of a prompt."""

    requests: int
    rows: int
    context: int

    @property
    def total_rows(self) -> int:
        return max(self.requests, 1) * self.rows


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured.

    Attributes:
        steps, drafts: as in CostProfile; empty where the KV cache has no room for a request. Without time for a longer
            context, its times are estimated from those of the short one.
        is_steady: whether steps of the same kind repeated their times, so that these are worth keeping.
    """

    steps: tuple[StepSample, ...]
    drafts: tuple[DraftSample, ...]
    is_steady: bool


def measure_costs(
    execute: Execute, info: ModelInfo, max_requests: int, max_rows: int, budget_s: float = BUDGET_S
) -> Costs:
    """Return the times of steps and of drafting calls; the executor has no requests before and after.

    It takes about `budget_s`: a large model is measured at fewer points, in fewer rounds. Raises FailedStepError: a
    request of it failed; InternalError: the executor broke.
    """
    requests = SyntheticRequests(execute, info, max_requests, (_SHORT_CONTEXT, _LONG_CONTEXT))
    if requests.max_count == 0:
        return Costs((), (), is_steady=True)
    try:
        return _Measurement(requests, info, max_rows, budget_s).run()
    finally:
        requests.end()


class _Measurement:
    """See measure_costs."""

    def __init__(self, requests: SyntheticRequests, info: ModelInfo, max_rows: int, budget_s: float) -> None:
        self._requests, self._info, self._max_rows, self._budget_s = requests, info, max_rows, budget_s
        self._begin = time.perf_counter()
        self._base = _Point(1, 1, requests.short_context)
        self._ms: dict[_Point, list[float]] = {}
        self._since_base_ms = self._ms_per_row = 0.0

    def run(self) -> Costs:
        self._fill_context()
        groups = [
            self._single_request(_DRAFTS),
            self._batches(_DRAFTS_IN_BATCH),
            self._in_long(),
            self._single_request(_MORE_DRAFTS),
            self._batches(_MORE_IN_BATCH),
            self._prompts(),
        ]
        self._requests.begin(1, self._base.context)
        self._measure(self._base)  # always, even without time
        num_settled = 0
        while num_settled < _SETTLED_ROUNDS and self._time_left_s(_STEPS_SHARE) > 0:
            before = self._least_ms()
            for points in groups:
                self._measure_group(points)
            after = self._least_ms()
            has_settled = all(point in before and ms > _SETTLED * before[point] for point, ms in after.items())
            num_settled = num_settled + 1 if has_settled else 0
        least = self._least_ms()
        found = monotone_fit(least)
        steps = (*_samples(found), *self._unmeasured_context(found))
        return Costs(steps, tuple(self._drafting()), self._is_steady(least, found))

    def _unmeasured_context(self, found: Mapping[Shape, float]) -> Iterator[StepSample]:
        """Estimate a longer context that was not measured: it is read as fast as the one-row step reads the weights.

        Else a step with long contexts would look like one of a slower machine, on which a draft takes longer, too.
        """
        short, long, info = self._base.context, self._requests.long_context, self._info
        if info.weight_bytes and short < long and all(context <= short for _, _, context in found):
            share = info.kv_token_bytes * (long - short) / info.weight_bytes
            yield StepSample(1, 1, long, found[self._base] * (1.0 + share))

    def _least_ms(self) -> dict[Shape, float]:
        """Return the fastest step of every kind: other programs only make steps longer.

        The one-row step is measured far more often, and the fastest of many is faster than the fastest of few. So its
        time is the expected fastest of as few.
        """
        found: dict[Shape, float] = {point: min(ms) for point, ms in self._ms.items()}
        counts = [len(ms) for point, ms in self._ms.items() if point != self._base]
        base = sorted(self._ms[self._base])
        found[self._base] = base[int(len(base) / (1 + median(counts)))] if counts else base[0]
        return found

    def _is_steady(self, least: Mapping[Shape, float], found: Mapping[Shape, float]) -> bool:
        """Whether most kinds of steps took about their fastest time twice, and few times contradict the others."""
        repeats = [sorted(ms)[1] / min(ms) for ms in self._ms.values() if len(ms) > 1]
        num_disturbed = sum(ms > _STEADY * found[shape] for shape, ms in least.items())
        return bool(repeats) and median(repeats) < _STEADY and num_disturbed <= _MAX_DISTURBED * len(least)

    def _fill_context(self) -> None:
        """Compute the KV of the longest context that time allows; the first rows also warm the model up."""
        requests = self._requests
        requests.begin(1, requests.long_context)
        self._fill(_WARM_UP_ROWS)
        while requests.num_filled < requests.long_context:
            num_rows = min(max(_SHORT_CONTEXT - requests.num_filled, 0) or _CHUNK, self._max_rows)
            if requests.num_filled >= requests.short_context:
                ahead_s = self._ms_per_row * num_rows / 1e3
                if time.perf_counter() + ahead_s - self._begin > _CONTEXT_SHARE * self._budget_s:
                    break
            num_rows, ms = self._fill(num_rows)
            if not self._ms:  # for slow models, this is the only step of many rows
                self._ms[_Point(0, num_rows, 0)] = [ms]

    def _fill(self, num_rows: int) -> tuple[int, float]:
        """Compute at most so many next rows of the prompt; returns how many, and their time."""
        before = self._requests.num_filled
        ms = _step_ms(self._requests.fill(min(num_rows, self._max_rows)))
        num_rows = self._requests.num_filled - before
        self._ms_per_row = ms / num_rows
        return num_rows, ms

    def _single_request(self, drafts: Sequence[int]) -> list[_Point]:
        """Points of one request at the short context."""
        return self._affordable(_Point(1, 1 + d, self._requests.short_context) for d in drafts)

    def _in_long(self) -> list[_Point]:
        """Points of one request and of several at the longest context that is filled."""
        context, points = self._requests.in_blocks(self._requests.num_filled), []
        if context > self._requests.short_context:
            batches = min(_BATCH_IN_LONG, 1 << self._requests.max_count.bit_length() - 1)
            points = [_Point(n, 1 + d, context) for n in sorted({1, batches}) for d in _DRAFTS_IN_LONG]
        return self._affordable(points)

    def _prompts(self) -> list[_Point]:
        """Parts of a prompt."""
        num_filled = self._requests.in_blocks(self._requests.num_filled)
        return self._affordable(_Point(0, rows, 0) for rows in (_SHORT_CONTEXT, _CHUNK) if rows <= num_filled)

    def _batches(self, drafts: Sequence[int]) -> list[_Point]:
        """Points of several requests at the short context, the most requests first: fewer lie between these and one."""
        counts = [1 << i for i in range(self._requests.max_count.bit_length() - 1, 0, -1)]
        counts = counts[::2] + counts[1::2]
        return self._affordable(_Point(n, 1 + d, self._requests.short_context) for d in drafts for n in counts)

    def _affordable(self, points: Iterable[_Point]) -> list[_Point]:
        num_rows = min(self._max_rows, _POINT_SHARE * self._budget_s * 1e3 / self._ms_per_row)
        num_drafts = self._info.speculation.max_draft_tokens
        return [p for p in points if p.total_rows <= num_rows and (p.requests == 0 or p.rows <= 1 + num_drafts)]

    def _measure_group(self, points: Sequence[_Point]) -> None:
        """Measure every point once that the remaining time allows."""
        if not points:
            return
        context = max(p.context for p in points) or self._requests.in_blocks(self._requests.num_filled)
        self._requests.begin(max(1, *(p.requests for p in points)), context)
        has_base = context == self._base.context
        if has_base:
            self._measure(self._base)
        for point in points:
            ahead_ms = self._ms[point][-1] if point in self._ms else self._ms_per_row * point.total_rows
            if self._time_left_s(_STEPS_SHARE) * 1e3 < ahead_ms:
                continue
            if has_base and self._since_base_ms >= _BASE_EVERY * self._ms[self._base][-1]:
                self._measure(self._base)
            self._measure(point)

    def _measure(self, point: _Point) -> None:
        ms = self._step(point)
        if ms < _WARM_UP_MS:
            ms = self._step(point)
        self._ms.setdefault(point, []).append(ms)
        self._since_base_ms = 0.0 if point == self._base else self._since_base_ms + ms

    def _step(self, point: _Point) -> float:
        if point.requests == 0:
            return _step_ms(self._requests.run_prompt(point.rows))
        return _step_ms(self._requests.run(point.requests, point.rows - 1))

    def _drafting(self) -> Iterator[DraftSample]:
        """Measure drafting calls; methods that run a model for one request at least, even without time."""
        speculation = self._info.speculation
        methods = [METHODS[name] for name in speculation.methods if METHODS[name].source is not None]
        methods.sort(key=lambda method: not method.needs_model)  # the slow ones first, while there is time
        counts = [n for n in (1, _NUM_DRAFTERS) if n <= self._requests.max_count]
        for i, method in enumerate(methods):
            wanted = (*(_MODEL_DRAFTS if method.needs_model else _OTHER_DRAFTS), speculation.max_draft_tokens)
            # A method with a model always drafts as many tokens as it writes slots for.
            most = speculation.num_lookahead_slots if method.needs_model else speculation.max_draft_tokens
            lengths = sorted({min(k, most) for k in wanted})
            found: dict[tuple[int, int], list[float]] = {(n, k): [] for n in counts for k in lengths}
            until = self._begin + self._budget_s * (_STEPS_SHARE + (1 - _STEPS_SHARE) * (i + 1) / len(methods))
            for turn in range(_DRAFT_ROUNDS):
                is_late = time.perf_counter() >= until
                if is_late and turn >= (_LEAST_MODEL_ROUNDS if method.needs_model else 0):
                    break
                if turn == 0 or not is_late:
                    self._requests.begin(1 if is_late else counts[-1], self._requests.short_context, method.name)
                for (count, length), times in found.items():
                    if count == 1 or time.perf_counter() < until:
                        times.append(self._requests.run(count, 0, length)["draft"])
            yield from (
                DraftSample(method.name, count, length, self._requests.short_context, max(min(times), _LEAST_MS))
                for (count, length), times in found.items()
                if times
            )

    def _time_left_s(self, share: float) -> float:
        """Seconds until a share of the budget is spent."""
        return self._begin + share * self._budget_s - time.perf_counter()


def _samples(found: Mapping[Shape, float]) -> list[StepSample]:
    samples = (StepSample(max(n, 1) * rows, n, context, ms) for (n, rows, context), ms in found.items())
    return sorted(samples, key=lambda s: (s.requests, s.context, s.rows))


def _step_ms(timings_ms: Mapping[str, float]) -> float:
    return max(sum(ms for phase, ms in timings_ms.items() if phase != "draft"), _LEAST_MS)
