"""What `verify` says while it runs."""

from __future__ import annotations

import sys
import time

import pytest

from fastdeploy_sd.cli.verify import Cell, Difference, EngineVariant
from fastdeploy_sd.cli.verify.progress import CellProgress, duration, estimate_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; a test moves it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_piped_progress_is_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with CellProgress(20) as progress:
        for i in range(5):
            clock[0] += 4
            progress.add(Cell("alone", f"m{i}"))
    assert capsys.readouterr() == ("", "verify: 3 of 20 cells, about 68 s left\n")


@pytest.mark.usefixtures("clock")
def test_a_difference_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with CellProgress(20) as progress:
        progress.add(Cell("alone", "ngram", Difference("r1", "token", 3, "5", "6")))
    assert capsys.readouterr().err.startswith("verify: DIFFERS: ngram, alone: ")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with CellProgress(2) as progress:
        progress.add(Cell("alone", "ngram"))
        progress.add(Cell("alone", "mtp"))
    assert "2/2" in capsys.readouterr().err


def test_the_estimate_follows_sequences_and_methods() -> None:
    ways = [EngineVariant("a"), EngineVariant("b", num_requests=12, num_passes=2)]
    one = estimate_s(ways, 1, 64, 10.0)
    assert one == pytest.approx((64 + 24) / 64 * 10 * 0.3)
    assert estimate_s(ways, 3, 64, 20.0) == pytest.approx(6 * one)
    assert [duration(s) for s in (0.4, 119, 121, 4000)] == ["0 s", "119 s", "2 min", "67 min"]
