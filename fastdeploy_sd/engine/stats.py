"""Engine statistics: the recorder the scheduler feeds, and the snapshot that leaves the process.

Knows no metric names of any monitoring system: `EngineStats` is plain numbers, so that it can cross a process border
as msgpack and be rendered elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types import I32, FinishReason, RequestMetrics

LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_TIME_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
TOKEN_COUNT_BOUNDS = tuple(float(1 << i) for i in range(18))

HISTOGRAM_BOUNDS: dict[str, tuple[float, ...]] = {
    "ttft_s": LATENCY_BOUNDS_S,
    "tpot_s": TOKEN_TIME_BOUNDS_S,
    "e2e_s": LATENCY_BOUNDS_S,
    "queue_s": LATENCY_BOUNDS_S,
    "inference_s": LATENCY_BOUNDS_S,
    "prefill_s": LATENCY_BOUNDS_S,
    "decode_s": LATENCY_BOUNDS_S,
    "prompt_tokens": TOKEN_COUNT_BOUNDS,
    "generated_tokens": TOKEN_COUNT_BOUNDS,
    "max_tokens": TOKEN_COUNT_BOUNDS,
}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counted observations.

    Attributes:
        bounds: upper bounds of the buckets, increasing; an observation equal to a bound belongs to its bucket.
        counts: observations per bucket (not cumulative), len(bounds) + 1 of them: the last one has no upper bound.
        sum: of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @staticmethod
    def empty(bounds: tuple[float, ...]) -> Histogram:
        """No observations yet."""
        return Histogram(bounds, (0,) * (len(bounds) + 1), 0.0)


def _empty_histograms() -> dict[str, Histogram]:
    return {name: Histogram.empty(bounds) for name, bounds in HISTOGRAM_BOUNDS.items()}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, gauges of now, and histograms over finished requests.

    Attributes:
        num_requests: submitted and taken.
        num_finished: finish reason -> requests that ended that way; every reason has a key.
        num_preemptions: times a request lost its blocks and was put back into the queue.
        num_steps: steps executed.
        num_prompt_tokens: prompt tokens of requests whose first token has been produced.
        num_generated_tokens: committed output tokens.
        num_prefix_queries, num_prefix_hits: requests looked up in the prefix cache / with at least one block found.
        num_prefix_query_tokens, num_prefix_hit_tokens: the same in tokens. First admissions only: what a preempted
            request finds of its own blocks would flatter the rate.
        num_draft_tokens: drafts judged.
        num_accepted_tokens: drafts accepted.
        num_emitted_tokens: output tokens of rows that had drafts to judge (accepted, then recovered or bonus).
        num_verified_rows: rows that had drafts to judge; emitted / verified rows is the mean tokens per verification.
        drafted_per_position, accepted_per_position: entry i counts the drafts judged / accepted at position i.
        timings_ms: phase of a step (as the executor names it: batch, forward, verify, draft) -> total milliseconds.
        num_running, num_waiting, num_preempted_waiting: requests now; the last is a part of the second.
        num_waiting_tokens: prompt tokens of the waiting requests.
        max_num_seqs: limit of num_running.
        block_size: tokens per block.
        num_blocks: total = free + cached + referenced by running requests.
        num_free_blocks: without content. num_cached_blocks: with reusable content, given away when free ones run out.
        histograms: by the names of `HISTOGRAM_BOUNDS`. ttft_s arrival to first token; tpot_s mean time per output
            token after the first; e2e_s arrival to end; queue_s arrival to first schedule; inference_s first schedule
            to end; prefill_s first schedule to first token; decode_s first token to end; the rest are token counts.
    """

    num_requests: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_verified_rows: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    timings_ms: dict[str, float] = field(default_factory=dict)
    num_running: int = 0
    num_waiting: int = 0
    num_preempted_waiting: int = 0
    num_waiting_tokens: int = 0
    max_num_seqs: int = 0
    block_size: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    histograms: dict[str, Histogram] = field(default_factory=_empty_histograms)


class _HistogramRecorder:
    """Accumulates one histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.sum)


class StatsRecorder:
    """Mutable counters of one engine. Plain attributes: the scheduler adds to them as things happen."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._num_finished = {reason.value: 0 for reason in FinishReason}
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_emitted_tokens = 0
        self._num_verified_rows = 0
        self._drafted_per_position = np.zeros(0, np.int64)
        self._accepted_per_position = np.zeros(0, np.int64)
        self._timings_ms: dict[str, float] = {}
        self._histograms = {name: _HistogramRecorder(bounds) for name, bounds in HISTOGRAM_BOUNDS.items()}

    def record_step(self, timings_ms: Mapping[str, float]) -> None:
        """Count an executed step and add up its phases."""
        self.num_steps += 1
        for phase, milliseconds in timings_ms.items():
            self._timings_ms[phase] = self._timings_ms.get(phase, 0.0) + milliseconds

    def record_prefix_lookup(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count the first look-up of a request in the prefix cache."""
        self.num_prefix_queries += 1
        self.num_prefix_hits += num_cached_tokens > 0
        self.num_prefix_query_tokens += num_prompt_tokens
        self.num_prefix_hit_tokens += num_cached_tokens

    def record_verification(self, num_draft: I32, num_accepted: I32, num_emitted: int) -> None:
        """Count the drafts of a step.

        Args:
            num_draft: i32[n] >= 1, drafts judged in each row that had any.
            num_accepted: i32[n], how many of them were accepted.
            num_emitted: output tokens of these rows together, after the cut at a stop.
        """
        self._num_verified_rows += len(num_draft)
        self._num_draft_tokens += int(num_draft.sum())
        self._num_accepted_tokens += int(num_accepted.sum())
        self._num_emitted_tokens += num_emitted
        self._drafted_per_position = _add_per_position(self._drafted_per_position, num_draft)
        self._accepted_per_position = _add_per_position(self._accepted_per_position, num_accepted)

    def record_finish(
        self, reason: FinishReason, metrics: RequestMetrics, num_prompt: int, num_generated: int, max_tokens: int
    ) -> None:
        """Count a request that ended and observe its times, those that exist."""
        self._num_finished[reason.value] += 1
        observe = self._observe
        observe("prompt_tokens", num_prompt)
        observe("generated_tokens", num_generated)
        observe("max_tokens", max_tokens)
        observe("e2e_s", metrics.finished_time - metrics.arrival_time)
        if metrics.first_scheduled_time:
            observe("queue_s", metrics.first_scheduled_time - metrics.arrival_time)
            observe("inference_s", metrics.finished_time - metrics.first_scheduled_time)
        if metrics.first_token_time:
            decode_s = metrics.finished_time - metrics.first_token_time
            observe("ttft_s", metrics.first_token_time - metrics.arrival_time)
            observe("prefill_s", metrics.first_token_time - metrics.first_scheduled_time)
            observe("decode_s", decode_s)
            if num_generated > 1:
                observe("tpot_s", decode_s / (num_generated - 1))

    def snapshot(self) -> EngineStats:
        """The counters and histograms so far; the gauges are left at 0 for their owners to fill in."""
        return EngineStats(
            num_requests=self.num_requests,
            num_finished=dict(self._num_finished),
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            num_prefix_query_tokens=self.num_prefix_query_tokens,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_emitted_tokens=self._num_emitted_tokens,
            num_verified_rows=self._num_verified_rows,
            drafted_per_position=tuple(self._drafted_per_position.tolist()),
            accepted_per_position=tuple(self._accepted_per_position.tolist()),
            timings_ms=dict(self._timings_ms),
            histograms={name: recorder.snapshot() for name, recorder in self._histograms.items()},
        )

    def _observe(self, name: str, value: float) -> None:
        # The frontend's clock stamps the arrival; a clock set back between the two must not make a time negative.
        self._histograms[name].observe(max(value, 0.0))


def _add_per_position(totals: npt.NDArray[np.int64], lengths: I32) -> npt.NDArray[np.int64]:
    """Add to entry i the number of rows longer than i; the result is as long as the longest row ever seen."""
    per_position = np.bincount(lengths)[::-1].cumsum()[::-1][1:]
    out = np.zeros(max(len(totals), len(per_position)), np.int64)
    out[: len(totals)] = totals
    out[: len(per_position)] += per_position
    return out
