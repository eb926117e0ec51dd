"""`bench compare` of this checkout with itself over the demo model, with numbers too small to mean anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.compare import StepTimes, compare_table
from benchmarks.engines import greedy_request
from benchmarks.peers.workers import ours
from benchmarks.step_cost import FixedDrafts, verify_rows
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.toy_executor import ToyExecutor

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--rounds", "1", "--context", "20", "--prompt", "30", "--model", "demo", "--num-threads", "1"]


def test_both_builds_take_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--other", str(ROOT), "--formats", "wint4", "--rows", "1", "4", "--cpu-time", "--json"]
    assert main([*argv, *SMALL]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["step"] for step in steps] == ["prompt of 30", "1 rows", "4 rows"]
    assert all(step["weights"] == "wint4" and step["other_ms"] > 0 < step["own_ms"] for step in steps)
    assert [step["to_one"] for step in steps[:2]] == [None, 1.0]


def test_a_build_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--other", str(ROOT), "--formats", "wint4", *SMALL, "--block-size", "7"]
    assert main(argv) == 1
    error = capfd.readouterr().err
    assert "block_size: expected" in error
    assert "error: compare: expected an answer, got exit status 1" in error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--other", "/"], "error: other: expected a checkout of this program, got /\n"),
        (["--other", str(ROOT), "--rows", "2"], "error: rows: expected 1 among them, got [2]\n"),
    ],
)
def test_wrong_options(options: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *options]) == 2
    assert capsys.readouterr().err == error


def test_speed_is_the_others_time_over_ours() -> None:
    table = compare_table(
        [StepTimes("wint8", "4 rows", 12.0, 10.0, 1.25), StepTimes("wint8", "prompt of 9", 1, 2, None)]
    )
    assert table.splitlines()[2:] == [
        "| wint8 | 4 rows | 12.00 | 10.00 | 1.20x | 1.25 |",
        "| wint8 | prompt of 9 | 1.00 | 2.00 | 0.50x | - |",
    ]


def test_a_step_over_another_number_of_rows_or_tokens_has_no_time() -> None:
    """As where there is no room for every draft, or one is accepted."""
    drafts = FixedDrafts()
    engine = Engine(toy_config(max_num_seqs=1), ToyExecutor(toy_info(num_blocks=64, max_draft_tokens=4), drafts))
    engine.submit(greedy_request("a", np.arange(1, 21, dtype=np.int32), 60))
    engine.step()
    drafts.num_drafts = 4
    for num_rows in (1, 5):  # the drafts of a step are verified in the next one
        before = engine.stats()
        outputs = engine.step()
        window = before, engine.stats()
        verify_rows(num_rows, window, outputs)
        for other_rows, others in ((num_rows + 1, outputs), (num_rows, []), (num_rows, outputs * 2)):
            message = f"expected {other_rows - 1} drafts verified and 1 token, got {num_rows - 1} and {len(others)}"
            with pytest.raises(InternalError, match=message):
                verify_rows(other_rows, window, others)


def test_the_compared_forward_pass_is_over_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of the comparison with other servers, over the toy model."""
    info = toy_info(num_blocks=64, max_draft_tokens=4)
    monkeypatch.setattr(ours, "create_executor", lambda config, make: ToyExecutor(info, make(config, None)))
    worker = ours.Ours()
    worker.load("demo", "bfloat16", {"threads": 1, "max_seqs": 1, "max_len": 60, "kv_cache_dtype": "auto"})
    worker.context(list(range(1, 21)))
    assert len(worker.forward(5, 3)["seconds"]) == 3
    with pytest.raises(InternalError, match="step: expected 5 drafts verified and 1 token, got 4 and 1"):
        worker.forward(6, 2)  # more than the engine has room for
    worker.stop()
