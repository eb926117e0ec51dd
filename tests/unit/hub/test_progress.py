"""How far a download has come is told in lines where there is no terminal, and as a bar where there is one."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from fastdeploy_sd.hub import huggingface
from fastdeploy_sd.hub.huggingface import FetchProgress

DEADLINE_S = 120.0


def test_lines_say_what_the_folder_has_gained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface, "_POLL_S", 0.01)
    monkeypatch.setattr(huggingface, "_LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(huggingface, "_GB", 1e6)  # so that little is written
    caplog.set_level(logging.INFO, "fastdeploy_sd")
    (tmp_path / "before").write_bytes(b"x" * 5000)
    deadline = time.monotonic() + DEADLINE_S
    with FetchProgress("some/model", tmp_path / "blobs", 400_000):
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "a.incomplete").write_bytes(b"x" * 100_000)
        while "fetching some/model: 0.1 of 0.4 GB" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "fetching some/model: 0.1 of 0.4 GB" in caplog.text
    assert "0.2 of" not in caplog.text
