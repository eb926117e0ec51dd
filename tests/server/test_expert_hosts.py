"""Servers of two hosts that share experts, each with an engine: what clients see when a host is lost, and is back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.ports import free_port
from tests.server.node_process import IPS, SECRET
from tests.server.outcomes import outcome
from tests.server.router_process import wait_until
from tests.server.split_deployment import ModelServer
from tests.server.test_data_parallel import check, post

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": [5, 6], "seed": 1, "logprobs": 2, "max_tokens": 500}


def rows(server: ModelServer) -> list[Any]:
    """Rows of each expert, as a server tells them."""
    found: list[Any] = post(server.url, "/get_per_expert_tokens_stats").json()["data"][0]
    return found


def test_streams_wait_for_a_host_that_is_lost(golden_dir: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "kv_cache_memory_gb": 0.1,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "ips": list(IPS),
        "node_port": free_port(),
        "pd_secret": SECRET,
        "timeout_engine": 2.0,
        "enable_eplb": True,
        "eplb_config": json.dumps({"redundant_experts_num": 2, "redundant_expert_dump_workload_interval": 3600}),
    }
    model = golden_dir / "qwen3_moe-tiny"

    def host(number: int) -> contextlib.closing[ModelServer]:
        return contextlib.closing(ModelServer(model, tmp_path, node_rank=number, **options))

    with host(0) as first, host(1) as second, ThreadPoolExecutor(1) as pool:
        expected = outcome(second.url, "/v1/completions", BODY)
        assert outcome(first.url, "/v1/completions", BODY | {"speculation": {"enabled": False}}) == expected
        wait_until(lambda: rows(first) == rows(second) != [])
        assert check(second.url)["data"] == check(first.url)["data"]
        refused = post(second.url, "/rearrange_experts")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_planner")
        running = pool.submit(outcome, first.url, "/v1/completions", BODY)
        wait_until(lambda: first.load()["num_requests_running"])
        os.kill(second.process.pid, signal.SIGKILL)
        first.wait_for_line("the experts of host 127.0.0.2.* are lost")
        assert not running.done()
        with host(1) as successor:
            first.wait_for_line("host 127.0.0.2.* shares its experts again")
            assert running.result() == expected
            assert outcome(successor.url, "/v1/completions", BODY) == expected
            for server in (first, successor):
                server.process.send_signal(signal.SIGTERM)
            assert (first.wait(), successor.wait()) == (0, 0)
            assert "Traceback" not in first.stderr + successor.stderr
