from __future__ import annotations

import dataclasses
import json

from fastdeploy_sd.engine.stats_recorder import DraftCounter, StatsRecorder
from fastdeploy_sd.types import DraftCounts, DraftSource, FinishReason, RequestMetrics
from fastdeploy_sd.types.stats import HISTOGRAM_BOUNDS, EngineStats, Histogram, SourceCounts


def test_a_fresh_recorder_gives_the_default_snapshot() -> None:
    assert StatsRecorder().snapshot() == EngineStats()


def test_a_snapshot_is_plain_numbers() -> None:
    stats = StatsRecorder()
    stats.record_drafts("ngram", counted((bytes(2), 1, 2)))
    stats.record_prefix_lookup(8, 4)
    snapshot = dataclasses.asdict(stats.snapshot())
    assert json.loads(json.dumps(snapshot))["drafts"]["custom"]["accepted"] == [1, 0]


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


def counted(*outcomes: tuple[bytes, int, int]) -> DraftCounter:
    counter = DraftCounter()
    for outcome in outcomes:
        counter.add(*outcome)
    return counter


def test_drafts_are_counted_by_source_and_position() -> None:
    stats, mtp, ngram = StatsRecorder(), int(DraftSource.MTP), int(DraftSource.NGRAM)
    stats.record_drafts("mtp", counted((bytes([mtp, ngram, ngram]), 1, 2), (bytes([mtp]), 0, 1)))
    stats.record_drafts("ngram", counted((bytes([mtp, ngram]), 2, 3)))
    assert stats.snapshot().drafts == {
        "mtp": SourceCounts(drafted=(3,), reached=(3,), accepted=(2,)),
        "ngram": SourceCounts(drafted=(0, 2, 1), reached=(0, 2, 0), accepted=(0, 1, 0)),
    }


def test_verifications_are_counted_by_method_while_requests_run_and_after() -> None:
    stats, ended, running, idle = StatsRecorder(), DraftCounter(), DraftCounter(), DraftCounter()
    ended.add(bytes(3), 2, 3)
    ended.add(bytes(3), 0, 1)
    ended.add(bytes(1), 1, 1)
    stats.record_drafts("mtp", ended)
    running.add(bytes(2), 2, 3)
    snapshot = stats.snapshot([("mtp", running), ("ngram", running), ("suffix", idle)])
    assert snapshot.verifications == {
        "mtp": DraftCounts(4, 8, drafted=(4, 3, 2), reached=(4, 2, 1), accepted=(3, 2, 0)),
        "ngram": DraftCounts(1, 3, drafted=(1, 1), reached=(1, 1), accepted=(1, 1)),
    }
    assert (snapshot.num_draft_tokens, snapshot.num_accepted_tokens) == (11, 7)
    assert (snapshot.num_emitted_tokens, snapshot.num_verified_rows) == (11, 5)
    assert stats.snapshot().verifications["mtp"].num_verifications == 3, "a snapshot changes nothing"


def test_positions_of_a_tree_are_depths() -> None:
    """Drafts 0 and 1 follow none, 2 and 3 follow 1, 4 follows 0; accepted are 1 and 3."""
    counter = DraftCounter()
    sources = bytes([DraftSource.NGRAM, DraftSource.SUFFIX, DraftSource.NGRAM, DraftSource.SUFFIX, DraftSource.NGRAM])
    counter.add(sources, 2, 3, tree=bytes([0, 0, 2, 2, 1]), path=bytes([2, 4]))
    assert counter.counts() == DraftCounts(1, 3, (2, 3), (2, 2), (1, 1))
    assert counter.accepted_by_source() == {"suffix": 2}
    assert counter.by_source() == {
        "ngram": SourceCounts((1, 2), (1, 1), (0, 0)),
        "suffix": SourceCounts((1, 1), (1, 1), (1, 1)),
    }
