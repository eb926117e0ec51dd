"""The cost of drafting by itself: what is timed and what is counted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.command import table_of
from benchmarks.proposers import COLUMNS, MODEL_FREE, measure_proposer


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("method", MODEL_FREE)
def test_a_text_that_repeats_itself_is_drafted_for(method: str) -> None:
    texts = np.tile(np.arange(10, 20, dtype=np.int32), (4, 8))
    cost = measure_proposer(method, texts, 50)
    # Thirty steps of four requests, a second each, every one with drafts; the first 200 tokens took a second too.
    assert cost.num_drafts >= 30 * 4
    cells = [cell.strip() for cell in table_of([cost], COLUMNS).splitlines()[2].strip("|").split("|")]
    assert cells[:-1] == [method, "4", "50", "250000.00", "1000000", "1000000", "5000.000"]
    assert float(cells[-1]) > 0


def test_a_text_that_never_does_is_not() -> None:
    texts = np.arange(2 * 80, dtype=np.int32).reshape(2, 80)
    assert measure_proposer("ngram", texts, 60).num_drafts == 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proposers", "--batch", "2", "--context", "64", "--steps", "4", "--json"]) == 0
    assert [cost["method"] for cost in json.loads(capsys.readouterr().out)] == ["ngram", "suffix"]
