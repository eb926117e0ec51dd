"""Moving pages from one process to another: every way is measured, and moves them."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.kv_transfer import COPY, PLAIN_TCP


def test_every_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "2", "--page-bytes", "1000", "--blocks", "3", "--rounds", "2"]
    assert main(["kv-transfer", "--protocols", "ipc", "tcp", *sizes, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_bytes"] == 6000
    assert [cost["way"] for cost in record["ways"]] == [COPY, PLAIN_TCP, "ipc", "tcp"]
    assert all(cost["gb_per_s"] == pytest.approx(6000 / cost["ms"] / 1e6) for cost in record["ways"])
    assert main(["kv-transfer", "--protocols", "ipc", *sizes]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "| way | ms | GB/s |"
