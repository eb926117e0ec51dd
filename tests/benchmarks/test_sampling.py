"""The cost of sampling by itself: every case is measured in every shape."""

from __future__ import annotations

import json

import pytest

from benchmarks import sampling
from benchmarks.__main__ import main
from benchmarks.command import table_of
from benchmarks.hardware import MemorySpeed
from benchmarks.sampling import CASES, COLUMNS, measure_sampling


@pytest.mark.usefixtures("ticking")
def test_every_case_is_measured_in_every_shape() -> None:
    costs = measure_sampling(500, [1, 4], [0, 1], repeats=2)
    shapes = [(1, 1), (1, 2), (4, 1), (4, 2)]
    assert [(c.case, c.requests, c.rows) for c in costs] == [(case, *shape) for case in CASES for shape in shapes]
    # Every call takes a second: eight rows of 2 kB.
    assert table_of(costs[3:4], COLUMNS).endswith("\n| greedy | 4 | 2 | 1000000 | 125000.0 | 0.0 |")
    assert costs[3].gb_per_s == pytest.approx(16e-6)


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
