"""A port of its own for metrics."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.doubles.ports import free_port
from tests.server.toy_process import WAIT_S, serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("workers", [1, 2])
def test_the_second_port_answers_monitoring_and_nothing_else(golden_dir: Path, workers: int) -> None:
    with serving(golden_dir, metrics_port=0, workers=workers, api_key="k") as server:
        url = server.wait_for_line(r"metrics are at (http://\S+)/metrics too")[1]
        assert url != server.url
        headers = {"Authorization": "Bearer k"}
        for base in (url, server.url):
            text = httpx.get(f"{base}/metrics", headers=headers, timeout=WAIT_S).text
            assert "fastdeploy:num_requests_running 0.0" in text
        assert httpx.get(f"{url}/metrics", timeout=WAIT_S).status_code == 401
        assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=WAIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "route_not_found")
        assert (
            "/metrics, /config-info, /health, /ping, /live, /ready on metrics_port"
            in refused.json()["error"]["message"]
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=WAIT_S)


def test_a_taken_port_is_named(golden_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(golden_dir, metrics_port=port) as server:
            assert server.wait() == 2
    line = f"error: host, metrics_port: expected a free address, got 127.0.0.1:{port}: Address already in use\n"
    assert server.stderr.endswith(line)


def test_the_same_port_twice_is_one(golden_dir: Path) -> None:
    port = free_port()
    with serving(golden_dir, port=port, metrics_port=port) as server:
        assert httpx.get(f"{server.url}/metrics", timeout=WAIT_S).status_code == 200
        assert "metrics are at" not in server.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
