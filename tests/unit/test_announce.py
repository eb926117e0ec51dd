"""The request that `scripts/dev serve` prints."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastdeploy_sd.config import Config, ModelConfig, ServerConfig

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "announce.py"


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script; what it does to the logging of its process ends with the test."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    spec = importlib.util.spec_from_file_location("announce", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
    ],
)
def test_the_url_is_one_this_machine_can_open(announce: ModuleType, host: str, url: str) -> None:
    assert announce.base_url(Config(ModelConfig("m"), server=ServerConfig(host=host, port=80))) == url


def test_the_request_can_be_pasted(announce: ModuleType) -> None:
    config = Config(ModelConfig("m", served_model_name=("it's",)), server=ServerConfig(api_key=("hush",)))
    text: str = announce.example_request(config)
    words = shlex.split(text)
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert (body["model"], body["stream"]) == ("it's", True)
    assert "Authorization: Bearer YOUR_KEY" in words
    assert "hush" not in text


def test_it_is_printed_when_the_server_answers(
    announce: ModuleType, golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = str(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            announce.main([str(os.getpid()), "--model", str(golden_dir / "qwen3-tiny"), "--port", port])
        finally:
            server.shutdown()
            thread.join()
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in capsys.readouterr().out


def test_it_ends_with_the_server(announce: ModuleType, golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert announce.main([str(ended.pid), "--model", str(golden_dir / "qwen3-tiny"), "--port", "1"]) == 0
    assert capsys.readouterr().out == ""


def test_a_wrong_option_is_left_to_the_server(announce: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert announce.main([str(os.getpid()), "--modle", "x"]) == 0
    assert capsys.readouterr().out == ""
