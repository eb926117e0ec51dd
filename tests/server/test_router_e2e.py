"""Streams of a real model survive the death of their server, whichever way the servers draft.

The demo model on real servers behind a real router; text, tokens and log-probabilities are those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_sd.entrypoints.launch import DEFAULT_EXECUTOR
from tests.doubles.ports import free_port
from tests.server.model_executors import Brake
from tests.server.outcomes import BODIES, LETTERS, TIMEOUT_S, outcome
from tests.server.router_process import Router, kill, wait_until
from tests.server.split_deployment import BRAKING, START_S, ModelServer, family

pytestmark = pytest.mark.slow


def demo_server(
    router: Router, state: Path, speculation: dict[str, object], role: str = "mixed", executor: str = DEFAULT_EXECUTOR
) -> ModelServer:
    """A server on the demo model."""
    options: dict[str, Any] = {"router": [router.address], "kv_cache_memory_gb": 0.3, "splitwise_role": role}
    return ModelServer("demo", state, executor, speculative_config=speculation, **options)


@pytest.mark.long
def test_every_stream_goes_on_at_a_server_that_drafts_otherwise(tmp_path: Path) -> None:
    methods: list[dict[str, object]] = [{"method": "mtp", "num_speculative_tokens": 3}, {"method": "ngram"}]
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(contextlib.closing(Router(tmp_path, free_port())))
        first, second = (
            stack.enter_context(contextlib.closing(demo_server(router, tmp_path, speculation)))
            for speculation in methods
        )
        wait_until(lambda: states(router) == {first.url: "available", second.url: "available"}, START_S)
        os.kill(second.process.pid, signal.SIGSTOP)
        wait_until(lambda: states(router) == {first.url: "available", second.url: "silent"})
        outcomes: dict[int, object] = {}

        def read(i: int) -> None:
            outcomes[i] = outcome(router.url, *BODIES[i])

        readers = [threading.Thread(target=read, args=(i,)) for i in range(len(BODIES))]
        for reader in readers:
            reader.start()
        wait_until(lambda: sum(instance["num_requests_running"] for instance in router.instances()) >= len(BODIES))
        os.kill(first.process.pid, signal.SIGSTOP)  # no stream ends while the other one comes back
        os.kill(second.process.pid, signal.SIGCONT)
        wait_until(lambda: states(router)[second.url] == "available")
        kill(first)
        for reader in readers:
            reader.join()
        # Those that had not ended when the server was stopped.
        assert router.metric("fastdeploy_sd:router_resumed_streams_total") > 0
        plain = {"speculation": {"enabled": False}}
        assert outcomes == {i: outcome(second.url, path, body | plain) for i, (path, body) in enumerate(BODIES)}


@pytest.mark.long
def test_a_stream_goes_on_at_another_decode_instance(tmp_path: Path) -> None:
    """Either one gets the KV of the prompt from the prefill instance, and the bytes are those of a server by itself."""
    naive: dict[str, object] = {"method": "naive"}
    prompt = "def add(a, b):\n    return a + b\n" * 20
    path, body = "/v1/completions", {"prompt": prompt, "seed": 4, "logprobs": 1, "max_tokens": 60, **LETTERS}
    brake = Brake(tmp_path, "decode")
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(contextlib.closing(Router(tmp_path, free_port(), splitwise="true")))
        servers = [
            stack.enter_context(contextlib.closing(demo_server(router, tmp_path, naive, role, BRAKING)))
            for role in ("prefill", "decode", "decode")
        ]
        wait_until(lambda: set(states(router)) == {server.url for server in servers}, START_S)
        outcomes: list[object] = []
        reader = threading.Thread(target=lambda: outcomes.append(outcome(router.url, path, body)))
        brake.pull(5)
        reader.start()
        wait_until(lambda: brake.stopped)
        victim = next(server for server in servers if brake.stopped in family(server.process.pid))
        kill(victim)
        brake.release()
        reader.join()
        (survivor,) = (server for server in servers[1:] if server is not victim)
        assert outcomes == [outcome(survivor.url, path, body)]
        moves = ("resumed_streams", "retries")  # the latter when it died before its first event
        assert sum(router.metric(f"fastdeploy_sd:router_{name}_total") for name in moves) == 1
        assert router.metric(f'fastdeploy_sd:router_requests_given_total{{instance="{servers[0].url[7:]}"') == 2
        supplied = httpx.get(f"{survivor.url}/metrics", timeout=TIMEOUT_S).text
        assert 'fastdeploy_sd:supplied_kv_tokens_total{origin="prefill"}' in supplied


def states(router: Router) -> dict[str, str]:
    """The state of each of a router's instances, by its URL."""
    return {f"http://{instance['address']}": instance["state"] for instance in router.instances()}
