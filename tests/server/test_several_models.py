"""One server of two models: each has its own engine, whose end concerns no request of the other model.

Processes, sockets, HTTP and signals are real; the model is the toy one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.router_process import wait_until
from tests.server.test_data_parallel import states, text_of
from tests.server.toy_process import WAIT_S, Program, Stream, complete, is_complete

pytestmark = pytest.mark.slow

START = """
import sys
from fastdeploy_sd.config import load_configs
from fastdeploy_sd.entrypoints import launch, worker_pool
worker_pool._MAX_QUICK_DEATHS = 1
sys.exit(launch.run(load_configs(sys.argv[2:]), "tests.server.lifecycle_executors:" + sys.argv[1]))
"""


@contextlib.contextmanager
def serving(golden_dir: Path, tmp_path: Path, executor: str, *flags: str) -> Iterator[tuple[Program, str]]:
    """A server of the models "toy" and "other", and where it serves."""
    model = str(golden_dir / "qwen3-tiny")
    models = json.dumps({"toy": model, "other": {"model": model, "served_model_name": "alias"}})
    argv = [sys.executable, "-c", START, executor, "--models", models, "--port", "0", *flags]
    with contextlib.closing(Program(argv, TMPDIR=str(tmp_path))) as server:
        yield server, server.wait_for_line(r"serving toy, other, alias on (http://\S+)")[1]


def tokens_by_model(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()
    samples = [line for line in lines if line.startswith("fastdeploy:generation_tokens_total{")]
    return {line.partition('model_name="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in samples}


def test_a_dead_engine_is_started_again_and_the_other_model_goes_on(golden_dir: Path, tmp_path: Path) -> None:
    with serving(golden_dir, tmp_path, "create_slow", "--workers", "2") as (server, url):
        server.wait_for_workers(2)
        listed: dict[str, Any] = httpx.get(f"{url}/v1/models", timeout=WAIT_S).json()
        assert [card["id"] for card in listed["data"]] == ["toy", "other", "alias"]
        assert complete(url, model="third").status_code == 404
        bodies = [{"model": model, "seed": 3, "temperature": 1.0} for model in ("toy", "alias")]
        streams = [Stream(url, 60, **body) for body in bodies]
        expected = [text_of(stream.read()) for stream in streams]
        assert tokens_by_model(url) == {"toy": 60, "other": 60}
        streams = [Stream(url, 60, **body) for body in bodies]
        kept, lost = server.children("engine_process")
        os.kill(lost, signal.SIGKILL)
        events = [stream.read() for stream in streams]
        assert all(map(is_complete, events))
        assert [text_of(e) for e in events] == expected
        wait_until(lambda: states(url) == ["ready", "ready"])
        assert kept in server.children("engine_process")
        assert server.stderr.count("leaves engine 0") == 1
        # Each process is connected again by itself, and connections are shared out among them.
        wait_until(lambda: {complete(url, model="alias").status_code for _ in range(6)} == {200})
        streams = [Stream(url, 40, **body) for body in bodies]
        server.process.send_signal(signal.SIGTERM)
        assert all(is_complete(stream.read()) for stream in streams)
        assert server.wait() == 0


def test_a_model_whose_engine_cannot_be_started_any_more_is_refused_alone(golden_dir: Path, tmp_path: Path) -> None:
    with serving(golden_dir, tmp_path, "create_other_once", "--timeout-engine", "1") as (server, url):
        kept, lost = server.children("engine_process")
        stream = Stream(url, 60)
        os.kill(lost, signal.SIGKILL)
        server.wait_for_line("no engine 1 process is started any more: 2 died in a row")
        refused = complete(url, model="other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
        assert complete(url).status_code == 200
        assert is_complete(stream.read())
        assert (states(url), server.children("engine_process")) == (["ready", "down"], [kept])
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
