"""The exposition: parsed back with Prometheus' own parser and compared with the numbers that went in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_sd.metrics import HttpStats, ProcessStats, RedisStats, SharedStats, render_metrics
from fastdeploy_sd.types import Calibration, ChoiceReport, DraftCounts, SpeculationInfo
from fastdeploy_sd.types.experts import ExpertStats
from fastdeploy_sd.types.stats import (
    EngineState,
    EngineStats,
    Histogram,
    SourceCounts,
    SwapStats,
    TransferStats,
    WayStats,
)
from tests.doubles.engines import run_to_end, toy_config, toy_info, toy_request

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _samples(stats: EngineStats) -> Samples:
    body, content_type = render_metrics({"toy": [EngineState("ready", 0.0, stats)]}, ProcessStats())
    assert content_type.startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation, f"{family.name} has no HELP text"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def _value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


STATS = EngineStats(
    num_requests=9,
    num_finished={"stop": 3, "length": 2, "abort": 1, "error": 1},
    num_preemptions=4,
    num_prefix_queries=8,
    num_prefix_hits=2,
    num_prefix_query_tokens=400,
    num_prefix_hit_tokens=80,
    num_prefix_swap_hit_tokens=20,
    swap=SwapStats(
        num_slots=40,
        num_used_slots=7,
        block_bytes=1000,
        num_lookups=6,
        num_hits=5,
        num_stored=9,
        num_loaded=4,
        num_evicted=2,
        num_lost=3,
        num_withdrawn=1,
        num_damaged=8,
        num_failed=11,
        num_late=12,
        load_seconds=0.5,
        store_seconds=0.25,
    ),
    transfers=TransferStats(
        received={"ipc": WayStats(6, 600, 2, 0.5)},
        sent={"tcp": WayStats(7, 700, 3, 1.5)},
        num_unsent=13,
        num_refused={"duplicate": 14, "damaged": 0},
    ),
    drafts={
        "mtp": SourceCounts((5, 4), (5, 4), (4, 1)),
        "ngram": SourceCounts((0, 0, 2, 1), (0, 0, 1, 0), (0, 0, 1, 0)),
    },
    verifications={
        "mtp": DraftCounts(4, 9, (4, 3, 2, 1), (4, 3, 1, 0), (3, 1, 1, 0)),
        "ngram": DraftCounts(1, 2, (1, 1), (1, 1), (1, 0)),
    },
    speculation=SpeculationInfo("mtp", ("naive", "mtp"), 4, 2, lossy=True),
    timings_ms={"forward": 1500.0},
    choice=ChoiceReport(
        gain=1.25,
        num_steps={"drafts": 7, "low_gain": 2},
        predicted_s=2.0,
        measured_s=3.0,
        calibrations={"suffix": Calibration(8, 5.5, 6, 1.0), "ngram": Calibration()},
    ),
    experts=ExpertStats({2: (5, 6), 3: (7, 8)}, {1: 0.5}, num_moves=9, num_moving=1),
    num_running=3,
    num_waiting=2,
    num_preempted_waiting=1,
    max_num_seqs=8,
    block_size=64,
    num_blocks=100,
    num_free_blocks=50,
    num_cached_blocks=30,
    num_state_snapshots=16,
    num_used_state_snapshots=11,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fastdeploy:requests_number_total", 9),
        ("fastdeploy_sd:expert_moves_total", 9),
        ("fastdeploy_sd:expert_moves_under_way", 1),
        ("fastdeploy:request_success_total", 5),
        ("fastdeploy:request_preempted_total", 4),
        ("fastdeploy:num_requests_running", 3),
        ("fastdeploy:num_requests_waiting", 2),
        ("fastdeploy:num_requests_preempted", 1),
        ("fastdeploy:num_requests_enqueued", 1),
        ("fastdeploy:available_batch_size", 5),
        ("fastdeploy:hit_req_rate", 0.25),
        ("fastdeploy:hit_token_rate", 0.25),
        ("fastdeploy:prefix_cache_token_num_total", 100),
        ("fastdeploy:prefix_gpu_cache_token_num_total", 80),
        ("fastdeploy:prefix_cpu_cache_token_num_total", 20),
        ("fastdeploy:gpu_hit_token_rate", 0.2),
        ("fastdeploy:cpu_hit_token_rate", 0.05),
        ("fastdeploy_sd:state_snapshots", 16),
        ("fastdeploy_sd:state_snapshots_used", 11),
        ("fastdeploy_sd:swap_slots", 40),
        ("fastdeploy_sd:swap_used_slots", 7),
        ("fastdeploy_sd:swap_lookups_total", 6),
        ("fastdeploy_sd:swap_hits_total", 5),
        ("fastdeploy_sd:swap_evictions_total", 2),
        ("fastdeploy_sd:swap_late_loads_total", 12),
        ("fastdeploy:send_cache_failed_num_total", 13),
        ("fastdeploy:available_gpu_block_num", 80),
        ("fastdeploy:free_gpu_block_num", 50),
        ("fastdeploy:available_gpu_resource", 0.8),
        ("fastdeploy:gpu_cache_usage_perc", 0.2),
        ("fastdeploy:spec_decode_draft_acceptance_rate", 6 / 12),
        ("fastdeploy:spec_decode_efficiency", 11 / (12 + 5)),
        ("fastdeploy:spec_decode_num_emitted_tokens_total", 11),
        ("fastdeploy:spec_decode_draft_single_head_acceptance_rate_0", 4 / 5),
        ("fastdeploy:spec_decode_draft_single_head_acceptance_rate_1", 1 / 4),
        ("fastdeploy:spec_decode_draft_single_head_acceptance_rate_2", 1.0),
        ("fastdeploy_sd:spec_decode_mean_acceptance_length", 11 / 5),
        ("fastdeploy_sd:spec_decode_verifications_total", 5),
    ],
)
def test_values(name: str, expected: float) -> None:
    assert _value(_samples(STATS), name) == pytest.approx(expected)


def test_labelled_values() -> None:
    samples = _samples(STATS)
    assert _value(samples, "fastdeploy_sd:requests_finished_total", reason="abort") == 1
    assert _value(samples, "fastdeploy_sd:step_time_seconds_total", phase="forward") == 1.5
    ends = {"stored": 9, "loaded": 4, "lost": 3, "withdrawn": 1, "damaged": 8, "failed": 11}
    assert {end: _value(samples, "fastdeploy_sd:swap_copies_total", end=end) for end in ends} == ends
    for name, stored, loaded in (("swap_bytes", 9000, 4000), ("swap_seconds", 0.25, 0.5)):
        assert _value(samples, f"fastdeploy_sd:{name}_total", direction="stored") == stored
        assert _value(samples, f"fastdeploy_sd:{name}_total", direction="loaded") == loaded
    received, sent = {"direction": "received", "protocol": "ipc"}, {"direction": "sent", "protocol": "tcp"}
    for name, values in {"s": (2, 3), "_seconds": (0.5, 1.5), "_pages": (6, 7), "_bytes": (600, 700)}.items():
        family = f"fastdeploy_sd:kv_transfer{name}_total"
        assert (_value(samples, family, **received), _value(samples, family, **sent)) == values
    for reason, count in (("duplicate", 14), ("damaged", 0)):
        assert _value(samples, "fastdeploy_sd:kv_transfer_refusals_total", reason=reason) == count
    assert _value(samples, "fastdeploy_sd:kv_cache_blocks", state="used") == 20
    rows = {("2", "0"): 5, ("2", "1"): 6, ("3", "0"): 7, ("3", "1"): 8}
    for (rank, layer), count in rows.items():
        assert _value(samples, "fastdeploy_sd:expert_rows_total", rank=rank, layer=layer) == count
    assert _value(samples, "fastdeploy_sd:expert_balancedness", layer="1") == 0.5
    assert _value(samples, "fastdeploy:cache_config_info", block_size="64", num_gpu_blocks="100") == 1


def test_drafts_are_counted_by_method_and_by_source() -> None:
    samples, name = _samples(STATS), "fastdeploy_sd:spec_decode"
    assert _value(samples, f"{name}_draft_tokens_by_method_total", method="mtp", position="1") == 3
    assert _value(samples, f"{name}_reached_tokens_by_method_total", method="mtp", position="3") == 0
    assert _value(samples, f"{name}_accepted_tokens_by_method_total", method="ngram", position="0") == 1
    assert _value(samples, f"{name}_draft_tokens_by_source_total", source="ngram", position="2") == 2
    assert _value(samples, f"{name}_reached_tokens_by_source_total", source="ngram", position="2") == 1
    assert _value(samples, f"{name}_accepted_tokens_by_source_total", source="mtp", position="1") == 1
    assert _value(samples, f"{name}_emitted_tokens_by_method_total", method="mtp") == 9
    assert _value(samples, f"{name}_verifications_by_method_total", method="ngram") == 1
    assert _value(samples, f"{name}_mean_acceptance_length_by_method", method="mtp") == 9 / 4
    assert _value(samples, f"{name}_config_info", method="mtp", num_speculative_tokens="4", lossy="true") == 1


def test_a_server_without_drafts_says_so() -> None:
    samples, name = _samples(EngineStats()), "fastdeploy_sd:spec_decode"
    assert _value(samples, f"{name}_config_info", method="naive", num_speculative_tokens="0", lossy="false") == 1
    assert not [key for key in samples if "acceptance" in key[0] or "_by_" in key[0]]


@pytest.mark.parametrize(
    ("name", "stats"),
    [
        ("fastdeploy:spec_decode_draft_acceptance_rate", EngineStats()),
        ("fastdeploy:hit_token_rate", EngineStats()),
        ("fastdeploy:gpu_cache_usage_perc", EngineStats()),
        ("fastdeploy:spec_decode_draft_single_head_acceptance_rate_3", STATS),
    ],
)
def test_a_ratio_of_nothing_has_no_sample(name: str, stats: EngineStats) -> None:
    assert (name, ()) not in _samples(stats)


def test_histogram_buckets_are_cumulative_and_end_at_the_count() -> None:
    histograms = {**EngineStats().histograms, "ttft_s": Histogram((0.5, 2.0), (3, 0, 4), 21.5)}
    samples = _samples(EngineStats(histograms=histograms))
    name = "fastdeploy:time_to_first_token_seconds"
    assert [_value(samples, f"{name}_bucket", le=le) for le in ("0.5", "2.0", "+Inf")] == [3, 3, 7]
    assert _value(samples, f"{name}_count") == 7
    assert _value(samples, f"{name}_sum") == 21.5


def test_a_real_engines_numbers_add_up() -> None:
    from fastdeploy_sd.engine.engine import Engine
    from tests.doubles.toy_executor import ToyExecutor

    engine = Engine(toy_config(), ToyExecutor(toy_info()))
    for i in range(5):
        engine.submit(toy_request(f"r{i}", [3, 4, 5, i], max_tokens=6))
    run_to_end(engine)
    samples = _samples(engine.stats())
    assert _value(samples, "fastdeploy:request_success_total") == 5
    assert _value(samples, "fastdeploy:prompt_tokens_total") == 20
    assert _value(samples, "fastdeploy:generation_tokens_total") == 30
    assert _value(samples, "fastdeploy:e2e_request_latency_seconds_count") == 5
    assert _value(samples, "fastdeploy:request_generation_tokens_sum") == 30
    assert _value(samples, "fastdeploy:gpu_cache_usage_perc") == 0


def test_a_speculating_engines_numbers_add_up() -> None:
    from tests.doubles.bench import Bench, oracle

    requests = [toy_request(name, [3, 4, 5], max_tokens=9) for name in "ab"]
    bench = Bench(info={"max_draft_tokens": 3}, proposer=oracle(requests))
    bench.submit(*requests)
    bench.finish()
    samples = _samples(bench.engine.stats())
    # Each request: 1 token, then 3 drafts and a bonus, twice.
    assert _value(samples, "fastdeploy:spec_decode_num_draft_tokens_total") == 12
    assert _value(samples, "fastdeploy:spec_decode_num_accepted_tokens_total") == 12
    assert _value(samples, "fastdeploy:spec_decode_num_emitted_tokens_total") == 16
    assert _value(samples, "fastdeploy:spec_decode_draft_acceptance_rate") == 1
    assert _value(samples, "fastdeploy:spec_decode_efficiency") == 1
    assert _value(samples, "fastdeploy_sd:spec_decode_mean_acceptance_length") == 4
    by_method = [
        value
        for (name, labels), value in samples.items()
        if name == "fastdeploy_sd:spec_decode_draft_tokens_by_method_total" and ("method", "ngram") in labels
    ]
    assert by_method == [4, 4, 4]


def test_what_processes_count_is_told_together(tmp_path: Path) -> None:
    """Each writes its own counts; a successor goes on from them."""
    ours, others = SharedStats(tmp_path, "http"), SharedStats(tmp_path, "scheduler")
    for stats, where in ((ours, "pushed"), (others, "taken")):
        stats.own.http.num_accepted = 2
        stats.own.http.num_open = 1
        stats.own.redis = RedisStats(
            Counter({where: 3}), Counter(draining=4), Counter(push=5), Counter(timeout=6), Counter(pushed=7)
        )
        stats.publish()
    successor = SharedStats(tmp_path, "http")
    assert successor.own.http.num_open == 0
    for stats in (ours, others):
        assert stats.total().http.num_open == 2
    body, _ = render_metrics({"toy": [EngineState("down")]}, successor.total())
    text = body.decode()
    for line in (
        "http_connections_accepted_total 4.0",
        "http_connections 1.0",
        'redis_requests_total{place="pushed"} 3.0',
        'redis_requests_total{place="taken"} 3.0',
        'redis_moves_total{reason="draining"} 8.0',
        'redis_round_trips_total{purpose="push"} 10.0',
        'redis_errors_total{kind="timeout"} 12.0',
        'redis_bytes_total{direction="pushed"} 14.0',
    ):
        assert f"fastdeploy_sd:{line}\n" in text


def test_http_counts_are_told_with_and_without_an_engine() -> None:
    http = HttpStats(num_open=3, num_accepted=9)
    http.refused["limit"] = 2
    http.closed["headers_timeout"] = 4
    http.requests["/health", "200", ""] = 5
    http.requests["other", "404", "route_not_found"] = 1
    for stats in (None, EngineStats()):
        body, _ = render_metrics({"toy": [EngineState("ready", 1.5, stats)]}, ProcessStats(http))
        families = {f.name: f for f in text_string_to_metric_families(body.decode())}
        found = {
            name: {tuple(s.labels.values()): s.value for s in families[f"fastdeploy_sd:{name}"].samples}
            for name in ("http_connections", "http_connections_accepted", "http_connections_refused")
        }
        assert found == {
            "http_connections": {(): 3},
            "http_connections_accepted": {(): 9},
            "http_connections_refused": {("limit",): 2},
        }
        requests = families["fastdeploy_sd:http_requests"].samples
        assert {(s.labels["route"], s.labels["status"], s.labels["error"]): s.value for s in requests} == http.requests
        assert families["fastdeploy_sd:engine_silence_seconds"].samples[0].value == 1.5
        assert ("fastdeploy:requests_number" in families) is (stats is not None)


def test_what_a_method_that_chooses_has_chosen() -> None:
    samples, name = _samples(STATS), "fastdeploy_sd:spec_decode"
    assert _value(samples, f"{name}_gain") == 1.25
    assert _value(samples, f"{name}_step_time_ratio") == 1.5
    assert _value(samples, f"{name}_choices_total", choice="low_gain") == 2
    assert _value(samples, f"{name}_scored_drafts_total", source="suffix") == 8
    assert _value(samples, f"{name}_expected_right_drafts_total", source="suffix") == 5.5
    assert _value(samples, f"{name}_right_drafts_total", source="suffix") == 6
    assert _value(samples, f"{name}_brier_score", source="suffix") == 0.125
    assert (f"{name}_brier_score", (("source", "ngram"),)) not in samples
    assert not any(key.startswith((f"{name}_gain", f"{name}_choices_")) for key, _ in _samples(EngineStats()))
