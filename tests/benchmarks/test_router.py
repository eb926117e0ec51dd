"""`bench router` against a real router and server, with numbers too small to mean anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import router


def test_medians_and_differences() -> None:
    metrics = router.router_metrics(
        {"direct": [1.0, 2.0, 9.0], "through the router": [3.0, 3.5, 4.0]},
        {"direct": [100.0], "through the router": [130.0]},
        {"request": [5.0, 7.0, 6.0], "token": [8.0]},
    )
    assert metrics["added per request, ms"] == 1.5
    assert metrics["added per streamed token, us"] == 30.0
    assert metrics["router cpu per request, us"] == 6.0
    assert "| added per request, ms | 1.500 |" in router.router_table(metrics)


def test_a_router_and_a_server_are_started_measured_and_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    sizes = ["--num-requests", "3", "--clients", "2", "--output-len", "5", "--rounds", "1"]
    assert router.main(["--model", "demo", "--num-gpu-blocks-override", "64", *sizes, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert all(metrics[f"router cpu per {unit}, us"] > 0 for unit in ("request", "streamed token"))
    assert metrics["request of one token, through the router, ms"] > 0
