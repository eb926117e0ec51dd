from __future__ import annotations

import dataclasses
import json

import numpy as np

from fastdeploy_sd.engine.stats import HISTOGRAM_BOUNDS, EngineStats, Histogram, StatsRecorder
from fastdeploy_sd.types import FinishReason, RequestMetrics


def test_a_fresh_recorder_gives_the_default_snapshot() -> None:
    assert StatsRecorder().snapshot() == EngineStats()


def test_a_snapshot_is_plain_numbers() -> None:
    stats = StatsRecorder()
    stats.record_verification(np.array([2], np.int32), np.array([1], np.int32), 2)
    stats.record_prefix_lookup(8, 4)
    snapshot = dataclasses.asdict(stats.snapshot())
    assert json.loads(json.dumps(snapshot))["accepted_per_position"] == [1]


def test_a_value_on_a_bound_belongs_to_its_bucket() -> None:
    stats, metrics = StatsRecorder(), RequestMetrics(100.0, 100.5, 101.0, 103.0)
    stats.record_finish(FinishReason.LENGTH, metrics, num_prompt=4, num_generated=5, max_tokens=9)
    histograms = stats.snapshot().histograms
    assert {name: histogram.sum for name, histogram in histograms.items()} == {
        "ttft_s": 1.0,
        "tpot_s": 0.5,
        "e2e_s": 3.0,
        "queue_s": 0.5,
        "inference_s": 2.5,
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "prompt_tokens": 4,
        "generated_tokens": 5,
        "max_tokens": 9,
    }
    ttft = histograms["ttft_s"]
    assert ttft.bounds[ttft.counts.index(1)] == 1.0
    assert all(len(h.counts) == len(h.bounds) + 1 and h.count == 1 for h in histograms.values())


def test_times_that_never_came_are_not_observed() -> None:
    stats = StatsRecorder()
    stats.record_finish(FinishReason.ABORT, RequestMetrics(100.0, 0.0, 0.0, 103.0), 4, 0, 9)
    observed = {name for name, histogram in stats.snapshot().histograms.items() if histogram.count}
    assert observed == {"e2e_s", "prompt_tokens", "generated_tokens", "max_tokens"}


def test_a_clock_set_back_gives_no_negative_time() -> None:
    stats = StatsRecorder()
    stats.record_finish(FinishReason.ABORT, RequestMetrics(100.0, 0.0, 0.0, 99.0), 1, 0, 1)
    assert stats.snapshot().histograms["e2e_s"] == Histogram(
        HISTOGRAM_BOUNDS["e2e_s"], (1, *[0] * len(HISTOGRAM_BOUNDS["e2e_s"])), 0.0
    )


def test_verification_is_counted_per_position() -> None:
    stats = StatsRecorder()
    stats.record_verification(np.array([3, 1], np.int32), np.array([2, 0], np.int32), 4)
    stats.record_verification(np.array([2], np.int32), np.array([2], np.int32), 3)
    snapshot = stats.snapshot()
    assert snapshot.drafted_per_position == (3, 2, 1)
    assert snapshot.accepted_per_position == (2, 2)
    assert (snapshot.num_draft_tokens, snapshot.num_accepted_tokens, snapshot.num_emitted_tokens) == (6, 4, 7)
    assert snapshot.num_verified_rows == 3
