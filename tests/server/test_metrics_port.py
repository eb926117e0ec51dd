"""A port of its own for metrics."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import httpx
import pytest

from tests.e2e.server_process import running_server

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_second_port_answers_monitoring_and_nothing_else(workers: str) -> None:
    flags = ["--model", "demo", "--num-threads", "1", "--metrics-port", "0", "--workers", workers, "--api-key", "k"]
    with running_server(*flags) as server:
        found = re.search(r"metrics are at (http://\S+)/metrics too", "".join(server.log))
        assert found is not None
        url = found[1]
        assert url != server.url
        headers = {"Authorization": "Bearer k"}
        for base in (url, server.url):
            text = httpx.get(f"{base}/metrics", headers=headers, timeout=TIMEOUT_S).text
            assert "fastdeploy:num_requests_running 0.0" in text
        assert httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).status_code == 401
        assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=TIMEOUT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "route_not_found")
        assert (
            "/metrics, /config-info, /health, /ping, /live, /ready on metrics_port"
            in refused.json()["error"]["message"]
        )
        assert server.stop() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=TIMEOUT_S)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "fastdeploy_sd.entrypoints.openai.api_server",
            "--model",
            "demo",
            "--port",
            "0",
        ]
        done = subprocess.run(
            [*command, "--metrics-port", str(port)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert done.returncode == 2
    line = f"error: host, metrics_port: expected a free address, got 127.0.0.1:{port}: Address already in use\n"
    assert done.stderr.endswith(line)


def test_the_same_port_twice_is_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with running_server("--model", "demo", "--num-threads", "1", "--port", port, "--metrics-port", port) as server:
        assert httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).status_code == 200
        assert "metrics are at" not in "".join(server.log)
        assert server.stop() == 0
