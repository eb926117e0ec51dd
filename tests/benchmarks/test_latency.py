"""`bench latency` against a real server, with numbers too small to mean anything."""

from __future__ import annotations

import json

import pytest

from benchmarks import latency
from benchmarks.latency import FirstToken, first_token_metrics, latency_table
from fastdeploy_sd.errors import Unavailable


def test_medians_and_what_http_adds() -> None:
    samples = [FirstToken(9.0, 4.0, 3.0, 2.0), FirstToken(5.0, 1.0, 3.0, 1.0), FirstToken(8.0, 2.0, 2.0, 4.0)]
    metrics = first_token_metrics(samples)
    assert metrics == {
        "total, ms": 8.0,
        "before, ms": 2.0,
        "engine, ms": 3.0,
        "after, ms": 2.0,
        "added by http, ms": 6.0,
        "added by http at best, ms": 2.0,
    }
    assert "| before, ms | 2.00 |" in latency_table(metrics)


def test_a_server_is_started_measured_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-requests", "3", "--clients", "2", "--output-len", "5"]
    assert latency.main(["--model", "demo", "--num-gpu-blocks-override", "64", *sizes, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["total, ms"] > metrics["engine, ms"] > 0
    assert all(
        metrics[f"{name} cpu per {unit}, us"] > 0
        for name in ("http", "engine")
        for unit in ("request", "streamed token")
    )


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(Unavailable, match=r"server: expected it to start, got\n.*block_size"):
        latency.main(["--model", "demo", "--block-size", "3"])
