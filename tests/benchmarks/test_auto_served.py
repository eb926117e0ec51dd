"""`bench auto --served`: arrivals, ratios of turns, and two real servers under a load too small to mean anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import auto
from benchmarks.auto_served import Scenario, served_metrics, served_table
from benchmarks.record import Record
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.draft_methods import NAIVE


def test_arrivals_follow_the_shares_of_the_capacity() -> None:
    scenario = Scenario("jumping", (0.25, 1.5, 0.25))
    times = scenario.due_times_s(capacity=100.0, seconds=60.0, seed=1)
    assert times == scenario.due_times_s(100.0, 60.0, 1) != scenario.due_times_s(100.0, 60.0, 2)
    assert times == sorted(times)
    counts = [sum(begin <= t < begin + 20 for t in times) for begin in (0, 20, 40)]
    # Poisson: 500, 3000 and 500 are expected; six standard deviations are allowed.
    assert all(abs(got - mean) < 6 * mean**0.5 for got, mean in zip(counts, (500, 3000, 500), strict=True))
    assert Scenario("idle", (0.2,)).due_times_s(capacity=1e-9, seconds=5.0, seed=0) == [0.0]


def turn(tokens_per_s: float, tpot_ms: float, failed: int = 0) -> dict[str, Any]:
    times = {"p50": tpot_ms, "p90": tpot_ms, "p99": 2 * tpot_ms}
    return {"output_tokens_per_s": tokens_per_s, "tpot_ms": times, "ttft_ms": times, "e2e_ms": None} | {
        "num_failed": failed
    }


def test_ratios_are_of_turns_side_by_side() -> None:
    turns = [
        {NAIVE: turn(100, 8.0), "ngram": turn(110, 4.0)},
        {NAIVE: turn(10, 80.0), "ngram": turn(12, 20.0, failed=1)},
        {NAIVE: turn(200, 4.0), "ngram": turn(200, 4.0)},
    ]
    metrics = served_metrics(turns, "ngram")
    assert metrics["output_tokens_per_s"] == {"ratio": 1.1, "plain": 100, "drafting": 110}
    assert metrics["tpot_p50"] == {"ratio": 2.0, "plain": 8.0, "drafting": 4.0}
    assert metrics["tpot_p99"] == {"ratio": 2.0, "plain": 16.0, "drafting": 8.0}
    assert metrics["e2e_p50"] == {"ratio": None, "plain": None, "drafting": None}
    assert metrics["num_failed"] == 1
    workload = {"scenario": "20 %", "setting": "ngram"}
    record = Record(kind="auto-served", name="r", config={}, hardware={}, workload=workload, metrics=metrics)
    row = served_table([record]).splitlines()[2]
    assert row == "| 20 % | ngram | 100.0, 1.10x | 8.0, 2.00x | 16.0, 2.00x | 8.0, 2.00x | - | 1 |"


def test_two_servers_take_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sizes = ["--seconds", "1", "--repeats", "1", "--output-len", "4", "--concurrency", "2", "--loads", "20"]
    server = ["--model", "demo", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]
    out = ["--output", str(tmp_path / "out")]
    assert auto.main(["--served", *server, *sizes, "--workloads", "random", "--drafts", "2", *out]) == 0
    records = {record.workload["scenario"]: record for record in Record.load_all(tmp_path / "out")}
    assert set(records) == {"20 %", "jumping", "neighbour"}
    for record in records.values():
        assert record.metrics["num_failed"] == 0
        assert set(record.repeats[0]) == {NAIVE, "auto"}
        assert all(found["num_complete"] >= 1 for found in record.repeats[0].values())
        assert record.metrics["tpot_p50"]["ratio"] > 0
    assert capsys.readouterr().out.count("| auto |") == 3
    with pytest.raises(ConfigError, match="setting: expected one method, got ngram, suffix"):
        auto.main(["--served", "--setting", "ngram", "suffix"])
