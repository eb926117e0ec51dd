"""The cost of drafting by itself: what is timed, what is counted, and the table."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastdeploy_sd.bench import drafters
from fastdeploy_sd.bench.__main__ import main
from fastdeploy_sd.bench.drafters import DrafterCost, drafters_table, measure_drafter


@pytest.mark.parametrize("method", drafters.MODEL_FREE)
def test_a_text_that_repeats_itself_is_drafted_for(method: str) -> None:
    texts = np.tile(np.arange(10, 20, dtype=np.int32), (3, 8))
    cost = measure_drafter(method, texts, 60)
    # Twenty steps of three requests, every one with drafts.
    assert cost.num_drafts >= 20 * 3
    assert (cost.batch, cost.context_len) == (3, 60)
    assert cost.bytes_per_token is not None
    assert cost.bytes_per_token > 0
    assert 0 < cost.step_us["p50"] <= cost.step_us["p99"]
    assert cost.us_per_request == cost.step_us["p50"] / 3


def test_a_text_that_never_does_is_not() -> None:
    texts = np.arange(2 * 80, dtype=np.int32).reshape(2, 80)
    assert measure_drafter("ngram", texts, 60).num_drafts == 0


def test_table() -> None:
    cost = DrafterCost("ngram", 64, 8192, 0.5, {"p50": 64.0, "p90": 70.0, "p99": 99.6}, 1.0, 5, None)
    row = drafters_table([cost]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "ngram", "64", "8192", "1.00", "64", "100", "0.500", "-",
    ]  # fmt: skip


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafters", "--batch", "2", "--context", "64", "--steps", "4", "--json"]) == 0
    assert [cost["method"] for cost in json.loads(capsys.readouterr().out)] == ["ngram", "suffix"]
    assert main(["drafters", "--batch", "0"]) == 2
    assert "batch: expected at least 1, got 0" in capsys.readouterr().err
