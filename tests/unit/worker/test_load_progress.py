"""Loading says how far it is: in the log where there is no terminal, as a bar where there is one."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from fastdeploy_sd.worker.loading import model_loading
from fastdeploy_sd.worker.loading.model_loading import LoadProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; a test moves it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_log_line_every_few_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LoadProgress(10_000_000_000) as progress:
        for _ in range(20):
            clock[0] += 1
            progress.add(400_000_000, 100_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        f"loading weights: {done} of about 10.0 GB" for done in ("2.0", "4.0", "6.0", "8.0")
    ]
    assert progress.num_packed_bytes == 2_000_000_000


@pytest.mark.usefixtures("clock")
def test_a_small_model_is_loaded_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LoadProgress(100) as progress:
        progress.add(100, 25)
    assert not caplog.records


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(model_loading, "_BAR_AFTER_S", 0.0)
    with LoadProgress(1000) as progress:
        progress.add(1000, 250)
    assert "loading weights" in capsys.readouterr().err
