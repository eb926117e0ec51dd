"""The cost of a step around the model: what runs, what is timed, and the table."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastdeploy_sd.bench.__main__ import main
from fastdeploy_sd.bench.host import PHASES, HostCost, HostLoad, host_table, measure_host

NO_BUFFER = np.ones(0, np.int64)


@pytest.mark.parametrize("load", [HostLoad(1), HostLoad(5, 3), HostLoad(4, 2, output_len=3)])
def test_every_phase_of_every_load_is_timed(load: HostLoad) -> None:
    cost = measure_host(load, 5, NO_BUFFER)
    assert cost.load == load
    assert tuple(cost.us) == PHASES
    assert all(0 < us["p50"] <= us["p99"] for us in cost.us.values())
    assert cost.total_us["p50"] > max(us["p50"] for us in cost.us.values())


def test_table() -> None:
    us = {phase: {"p50": 10.4 * i, "p90": 0.0, "p99": 0.0} for i, phase in enumerate(PHASES, 1)}
    row = host_table([HostCost(HostLoad(32, 4), us, {"p50": 99.6, "p90": 0.0, "p99": 200.0})]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "32", "4", "10", "21", "31", "42", "52", "100", "200",
    ]  # fmt: skip


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--batch", "1", "2", "--drafts", "0", "1", "--steps", "2", "--evict-mib", "0", "--json"]) == 0
    loads = [cost["load"] for cost in json.loads(capsys.readouterr().out)]
    assert [(load["num_requests"], load["num_drafts"]) for load in loads] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert main(["host", "--batch", "0"]) == 2
    assert "batch: expected at least 1, got 0" in capsys.readouterr().err
