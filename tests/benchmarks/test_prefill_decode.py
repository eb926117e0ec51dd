"""`bench prefill-decode` against real servers and routers, with numbers too small to mean anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prefill_decode
from benchmarks.prefill_decode import Times


def test_what_is_added_is_the_difference_of_the_medians() -> None:
    times = {
        "mixed": Times([1.0, 2.0, 9.0], [1.0], [2.0, 4.0], [3.0]),
        "1P1D": Times([3.0, 3.5, 4.0], [1.0], [], [5.0]),
    }
    mixed, apart = prefill_decode.deployment_costs(times, {"mixed": 0, "1P1D": 3})
    assert (mixed.added_ms, apart.added_ms, apart.num_handed_over) == (0.0, 1.5, 3)
    assert mixed.beside is not None
    assert (mixed.beside["p50"], apart.beside) == (3.0, None)  # its streams ended before the burst began


def test_both_deployments_are_started_measured_and_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    sizes = ["--singles", "1", "--prompt-len", "130", "--streams", "2", "--output-len", "8", "--burst", "2"]
    argv = ["--model", "demo", "--threads", "1", "--rounds", "1", "--kv-cache-memory-gb", "0.1", *sizes, "--json"]
    assert prefill_decode.main(argv) == 0
    mixed, apart = json.loads(capsys.readouterr().out)["deployments"]
    assert (mixed["deployment"], mixed["num_handed_over"]) == ("mixed", 0)
    # Of all prompts of more than a block, those of the round that is not counted too; one that is late is computed.
    assert apart["deployment"] == "1P1D"
    assert 0 < apart["num_handed_over"] <= 2 * 3
    assert all(cost[kind]["p50"] > 0 for cost in (mixed, apart) for kind in ("first", "burst"))
    assert apart["added_ms"] == apart["first"]["p50"] - mixed["first"]["p50"]
