"""Servers and LLM on a machine without a C++ compiler: what needs one is refused at the start, all else just runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

WAIT_S = 120
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3, "enable_draft_logprob": True})
SMALL = ["--model", "demo", "--port", "0", "--num-gpu-blocks-override", "64"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Without g++ and without operators that were compiled before."""
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    path = os.pathsep.join(filter(None, sys.path))
    return {**kept, "PATH": str(tmp_path), "FDSD_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}


@contextmanager
def server(environment: Mapping[str, str], *options: str) -> Iterator[str]:
    """A server until the end of the block, which it reaches alive; yields its address."""
    command = [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", *SMALL, *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(WAIT_S, process.kill)
        watchdog.start()
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"http://\S+", line):
                    break
            else:
                pytest.fail("".join(lines))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield match[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            watchdog.cancel()
            process.kill()


def test_draft_logprobs_need_no_compiler(environment: dict[str, str], tmp_path: Path) -> None:
    with server(environment, "--speculative-config", MTP) as url, httpx.Client(base_url=url, timeout=WAIT_S) as http:
        body = {"prompt": "def fib(n):", "max_tokens": 12, "temperature": 0}
        plain = http.post("/v1/completions", json=body).raise_for_status().json()
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "logprobs": True}
        answer = http.post("/v1/chat/completions", json=chat | {"include_draft_logprobs": True}).raise_for_status()
        drafts = answer.json()["choices"][0]["draft_logprobs"]["content"]
        assert drafts
        assert all(entry["logprob"] <= 0 for entry in drafts)
        again = http.post("/v1/completions", json=body).raise_for_status().json()
    assert plain["choices"][0]["text"] == again["choices"][0]["text"]
    assert not (tmp_path / "cache").exists(), "nothing was compiled"


@pytest.mark.parametrize(
    ("cache", "path", "message"),
    [
        ("cache", "", "Paddle operators: expected a C++ compiler (g++) on PATH to build them with, got none"),
        ("/dev/null/x", os.environ["PATH"], "FDSD_CACHE_DIR: expected a folder to write the Paddle operators to, got"),
    ],
)
def test_eager_execution_that_cannot_be_is_refused_at_the_start(
    cache: str, path: str, message: str, environment: dict[str, str], tmp_path: Path
) -> None:
    environment |= {"FDSD_CACHE_DIR": str(tmp_path / cache), "PATH": path or environment["PATH"]}
    command = [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", *SMALL, "--enforce-eager"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: enforce_eager: {message}")
    if path:  # LLM says what a server says
        return
    code = "from fastdeploy_sd import LLM; LLM(model='demo', enforce_eager=True, num_gpu_blocks_override=64)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert f"ConfigError: enforce_eager: {message}" in done.stderr


def test_eager_execution_compiles_before_it_serves(environment: dict[str, str]) -> None:
    """With operators that are kept already, no compiler is needed."""
    environment |= {"PATH": os.environ["PATH"]}
    environment.pop("FDSD_CACHE_DIR")
    for path in (environment["PATH"], ""):
        with server(environment | {"PATH": path}, "--enforce-eager") as url:
            body = {"prompt": "x", "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status()


def test_verify_says_what_it_leaves_out(environment: dict[str, str]) -> None:
    """The eager way is one of many; the others are run."""
    code = """
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.cli.verify import EngineVariant, runnable_variants
both = [EngineVariant("batch", 4), EngineVariant("eager", 4, enforce_eager=True)]
ways, reasons = runnable_variants(Config(ModelConfig("demo")), both)
print([way.name for way in ways], reasons)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.startswith("['batch'] {'eager': 'enforce_eager: Paddle operators: expected a C++ compiler")
