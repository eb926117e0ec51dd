"""`bench builds` of this checkout beside itself over the demo model, with numbers too small to mean anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.builds import StepTimes, builds_table

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--rounds", "1", "--context", "20", "--prompt", "30", "--model", "demo", "--num-threads", "1"]


def test_both_builds_take_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["builds", "--other", str(ROOT), "--formats", "wint4", "--rows", "1", "4", "--cpu-time", "--json"]
    assert main([*argv, *SMALL]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["step"] for step in steps] == ["prompt of 30", "1 rows", "4 rows"]
    assert all(step["weights"] == "wint4" and step["other_ms"] > 0 < step["own_ms"] for step in steps)
    assert [step["to_one"] for step in steps[:2]] == [None, 1.0]


def test_a_build_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["builds", "--other", str(ROOT), "--formats", "wint4", *SMALL, "--block-size", "7"]
    assert main(argv) == 1
    error = capfd.readouterr().err
    assert "block_size: expected" in error
    assert "error: builds: expected an answer, got exit status 1" in error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--other", "/"], "error: other: expected a checkout of this program, got /\n"),
        (["--other", str(ROOT), "--rows", "2"], "error: rows: expected 1 among them, got [2]\n"),
    ],
)
def test_wrong_options(options: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["builds", *options]) == 2
    assert capsys.readouterr().err == error


def test_speed_is_the_others_time_over_ours() -> None:
    table = builds_table(
        [StepTimes("wint8", "4 rows", 12.0, 10.0, 1.25), StepTimes("wint8", "prompt of 9", 1, 2, None)]
    )
    assert table.splitlines()[2:] == [
        "| wint8 | 4 rows | 12.00 | 10.00 | 1.20x | 1.25 |",
        "| wint8 | prompt of 9 | 1.00 | 2.00 | 0.50x | - |",
    ]
