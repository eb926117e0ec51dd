"""An engine that hangs, takes long, or is to stop: what clients and probes are told, and when."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.toy_process import WAIT_S, Server, Stream, complete, error_of, is_complete, serving

pytestmark = pytest.mark.slow


def engine_of(server: Server) -> int:
    (pid,) = server.children("engine_process")
    return pid


def health(server: Server) -> tuple[int, str | None]:
    response = httpx.get(f"{server.url}/health", timeout=WAIT_S)
    return response.status_code, response.json()["error"]["code"] if response.content else None


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_hangs_ends_its_requests_and_the_server(golden_dir: Path, workers: int) -> None:
    with serving(golden_dir, timeout_engine=2, workers=workers) as server:
        if workers > 1:
            server.wait_for_workers(workers)
        stream = Stream(server.url, max_tokens=4000)
        os.kill(engine_of(server), signal.SIGSTOP)
        assert error_of(stream.read())["code"] == "engine_down"
        assert server.wait() == 1
        assert "the engine has given no sign of life for" in server.stderr
        assert "error: the engine process failed (killed by SIGKILL)" in server.stderr


def test_every_http_process_tells_the_counts_of_all_and_of_the_dead(golden_dir: Path) -> None:
    def count(server: Server) -> float:
        text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
        found = re.search(r'http_requests_total\{error="",route="/v1/completions",status="200"\} (\S+)', text)
        return float(found[1]) if found else 0.0

    with serving(golden_dir, workers=2) as server:
        for _ in range(10):
            assert complete(server.url).status_code == 200
        wait_for(lambda: all(count(server) == 10 for _ in range(10)))
        first, second = server.wait_for_children("http_process", 2)
        os.kill(first, signal.SIGKILL)
        server.wait_for_line("another HTTP process starts")
        server.wait_for_children("http_process", 2)
        assert all(count(server) == 10 for _ in range(5))
        os.kill(second, signal.SIGSTOP)  # the new one has to answer
        assert count(server) == 10
        os.kill(second, signal.SIGCONT)


def test_a_short_suspension_costs_nothing_but_time_and_a_drain_ends_it(golden_dir: Path) -> None:
    with serving(golden_dir) as server:
        stream = Stream(server.url, max_tokens=100)
        os.kill(engine_of(server), signal.SIGSTOP)
        time.sleep(1)
        assert health(server) == (200, None)
        os.kill(engine_of(server), signal.SIGCONT)
        assert is_complete(stream.read())
        stream = Stream(server.url, max_tokens=100)
        os.kill(engine_of(server), signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert is_complete(stream.read())
        assert server.wait() == 0


def test_asking_a_suspended_engine_has_a_deadline_before_it_counts_as_silent(golden_dir: Path) -> None:
    with serving(golden_dir, timeout_engine=1000) as server:
        assert complete(server.url).status_code == 200
        os.kill(engine_of(server), signal.SIGSTOP)
        load = httpx.get(f"{server.url}/load", timeout=WAIT_S)
        assert (load.status_code, load.json()["error"]["code"]) == (503, "engine_busy")
        assert httpx.get(f"{server.url}/metrics", timeout=WAIT_S).status_code == 200


def test_a_long_step_is_no_silence(golden_dir: Path) -> None:
    """It answers no request for 3 s, but it computes."""
    with serving(golden_dir, "create_busy", timeout_engine=1) as server:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(complete(server.url, max_tokens=1)))
        assert server.url
        thread.start()
        while thread.is_alive():
            assert health(server) == (200, None)
            time.sleep(0.1)
        thread.join()
        assert answers[0].status_code == 200


@pytest.mark.parametrize("workers", [1, 2])
def test_http_drains_at_the_signal_not_at_the_engines_word(golden_dir: Path, workers: int) -> None:
    with serving(golden_dir, "create_stuck", workers=workers) as server:
        assert health(server) == (200, None)
        threading.Thread(target=lambda: complete(server.url), daemon=True).start()
        wait_for(lambda: "engine_busy" in httpx.get(f"{server.url}/load", timeout=WAIT_S).text)  # it is in its step
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        wait_for(lambda: all(health(server) == (503, "draining") for _ in range(10)))
        refused = complete(server.url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        server.process.send_signal(signal.SIGINT)
        server.wait_for_line("running requests end now")
        server.process.send_signal(signal.SIGTERM)  # the third: it ends at once
        assert server.wait() == 1
        assert "error: the engine process failed (killed by SIGKILL)" in server.stderr


def test_a_second_signal_has_a_deadline(golden_dir: Path) -> None:
    with serving(golden_dir, "create_stuck", timeout_graceful_shutdown=1000) as server:
        threading.Thread(target=lambda: complete(server.url), daemon=True).start()
        wait_for(lambda: "engine_busy" in httpx.get(f"{server.url}/load", timeout=WAIT_S).text)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")  # two signals that wait to be seen are one
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 1
