"""`bench ranks` over the demo model, with numbers too small to mean anything."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.ranks import decoding_plan


def test_every_step_is_timed_on_every_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ranks", "--model", "demo", "--batch", "2", "--prompt-len", "100", "--steps", "3", "--rounds", "2"]
    assert main([*argv, "--plans", "3", "--num-threads", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(p["num_requests"], p["num_drafts"]) for p in record["plans"]] == [(1, 0), (8, 0), (8, 5), (256, 0)]
    assert all(0 < p["encode_us"]["p50"] < p["order_us"]["p99"] and p["num_bytes"] > 0 for p in record["plans"])
    steps = {(s["what"], s["num_ranks"]): s for s in record["steps"]}
    assert set(steps) == {(what, size) for what in ("prompt of 100", "decode 2") for size in (1, 2)}
    assert all(s["ratio"] == s["ms"]["p50"] / steps[what, 1]["ms"]["p50"] > 0 for (what, _), s in steps.items())


def test_an_engine_that_does_not_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["ranks", "--model", "demo", "--plans", "1", "--ranks", "1", "--max-model-len", "1000000"]
    assert main(argv) == 1
    error = capfd.readouterr().err
    assert "error: max_model_len: expected" in error
    assert "error: ranks: expected an engine to answer, got its end" in error


def test_a_plan_grows_tables_once_per_block() -> None:
    plans = [decoding_plan(step, 8, 5) for step in range(320)]
    assert [int(plan.draft.cu_num_draft[-1]) for plan in plans[:2]] == [40, 40]
    assert sum(len(plan.deltas) for plan in plans) == 8 * 320 * 6 // 64
