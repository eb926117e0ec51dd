"""FD_LOG_DIR: every process of a server logs to a file of its own, and one that it cannot write stops the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import running_server

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


def test_every_process_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "log_prefill"
    monkeypatch.setenv("FD_LOG_DIR", str(folder))
    flags = ["--model", "demo", "--num-threads", "1", "--workers", "2", "--kv-cache-ratio", "0.7"]
    with running_server(*flags) as server:
        assert httpx.get(f"{server.url}/health", timeout=TIMEOUT_S).is_success
        assert server.stop() == 0
    assert {path.name for path in folder.glob("*.log")} >= {"engine.log", "http.log", "server.log"}
    written = {path.stem: path.read_text() for path in folder.glob("*.log")}
    assert "kv_cache_ratio: accepted without effect" in written["server"]
    assert f"serving demo on {server.url}" in written["server"]
    assert "loaded " in written["engine"]
    # The console has everything too.
    console = "".join(server.log)
    assert [line for text in written.values() for line in text.splitlines() if line not in console] == []


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path / "file"))
    command = [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", "--model", "demo", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: FD_LOG_DIR: expected a folder for log files, got '{tmp_path}/file': File exists\n"
