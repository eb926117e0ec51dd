"""The cost of sampling by itself: every case is measured, and the table."""

from __future__ import annotations

import json

import pytest

from fastdeploy_sd.bench import sampling
from fastdeploy_sd.bench.__main__ import main
from fastdeploy_sd.bench.hardware import MemorySpeed
from fastdeploy_sd.bench.sampling import CASES, SamplingCost, measure_sampling, sampling_table


def test_every_case_is_measured_in_every_shape() -> None:
    costs = measure_sampling(300, [1, 3], [0, 2], repeats=2)
    shapes = [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert [(c.case, c.requests, c.rows) for c in costs] == [(case, *shape) for case in CASES for shape in shapes]
    for cost in costs:
        assert cost.us_per_row == cost.us / (cost.requests * cost.rows)
        assert cost.gb_per_s == pytest.approx(4 * 300 / cost.us_per_row / 1e3)


def test_table() -> None:
    row = sampling_table([SamplingCost("greedy", 64, 5, 3554.2, 11.107, 54.7)]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["greedy", "64", "5", "3554", "11.1", "54.7"]


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Measuring memory takes half a gigabyte and tells nothing here.
    monkeypatch.setattr(sampling, "measure_memory", lambda: MemorySpeed(50.0, 100.0))
    options = ["--vocab-size", "50", "--batches", "2", "--drafts", "1", "--repeats", "1"]
    assert main(["sampling", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["case"] for cost in found["costs"]] == list(CASES)
    assert [speed["read_gb_per_s"] for speed in found["memory"]] == [50.0, 50.0]
    assert main(["sampling", *options]) == 0
    assert "memory reads 50, 50 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--vocab-size", "--batches", "--repeats"])
def test_a_count_below_one_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sampling", option, "0"]) == 2
    name = option.removeprefix("--").replace("-", "_")
    assert f"{name}: expected at least 1, got 0" in capsys.readouterr().err
