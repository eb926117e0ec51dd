"""The cost of exchanges and of slices: what is measured and printed."""

from __future__ import annotations

import json

import pytest

from benchmarks import collectives
from benchmarks.__main__ import main


def test_the_command_prints_every_exchange_and_every_product(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_WORKING_SET_BYTES", 1 << 16)
    monkeypatch.setattr(collectives, "_CALLS", 3)
    argv = ["collectives", "--ranks", "2", "--kib", "4,16", "--formats", "wint8", "--shapes", "512x64"]
    argv += ["--rows", "1", "5", "--rounds", "2"]
    assert main(argv) == 0
    exchanges, slices = capsys.readouterr().out.strip().split("\n\n")
    assert len(exchanges.splitlines()) == 2 + 4
    assert len(slices.splitlines()) == 2 + 2
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(c["op"], c["num_bytes"]) for c in record["exchanges"]] == [
        (op, kib << 10) for kib in (4, 16) for op in ("all_reduce", "all_gather")
    ]
    assert all(c["whole_us"] > 0 and c["ratio"] == c["sliced_us"] / c["whole_us"] for c in record["slices"])
