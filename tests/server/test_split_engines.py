"""Prefill and decode servers of unlike shapes, behind a router and over Redis: the bytes of one engine, also when an
engine dies or hangs.

An engine that is lost is noticed by its server, which starts it again. A request that a router or Redis had given to it
goes on at an engine that these choose.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.doubles.redis_server import running_redis
from tests.models.mtp_models import layout_of, make_model
from tests.server.model_executors import Brake
from tests.server.outcomes import outcome
from tests.server.router_process import Router, wait_until
from tests.server.split_deployment import BRAKING, START_S, ModelServer, SplitDeployment

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
MODEL = "glm4_moe-tiny"
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": 16,
    "num_gpu_blocks_override": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "cache_transfer_protocol": "tcp",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
}
# Of two engines, each of which also runs its half of the experts for the other one.
ENGINES: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "timeout_engine": 3,
}
RANKS: dict[str, dict[str, Any]] = {
    "prefill": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "decode": {"tensor_parallel_size": 2},
}
NUM_INSTANCES = 6
FORMS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.1, "top_p": 0.9},
    {"temperature": 0.8, "seed": 5, "logprobs": 1, "guided_regex": "[a-z ]{900}", "ignore_eos": False},
    {"temperature": 1.0, "seed": 3, "n": 2},
]
_numbers = itertools.count()


@dataclass
class Engines:
    """A deployment, and a server of one engine that nothing is done to.

    Attributes:
        several: of each role the server of several engines. ranks: that of one engine with several ranks.
    """

    deployment: SplitDeployment
    router: Router
    several: dict[str, ModelServer]
    ranks: dict[str, ModelServer]
    alone: ModelServer

    def wait_ready(self) -> None:
        """Wait until all engines take requests, and the router knows."""
        for server in self.several.values():
            wait_until(lambda: states(server) == ["ready", "ready"], START_S)  # noqa: B023 (called here)
        wait_until(lambda: [i["state"] for i in self.router.instances()] == ["available"] * NUM_INSTANCES, START_S)

    def verify(self, url: str, bodies: list[dict[str, Any]], number: signal.Signals, role: str, steps: int) -> None:
        """Send requests; when an engine of a role has taken some steps a signal comes to it, and no answer differs."""
        brake, engines = Brake(self.deployment.state, role), self.several[role].children("engine_process")
        brake.pull(steps)
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = [pool.submit(outcome, url, PATH, body) for body in bodies]
            wait_until(lambda: brake.stopped, START_S)
            victim = brake.stopped
            assert victim is not None
            os.kill(victim, number)
            brake.release()
            found = [answer.result(START_S) for answer in asked]
        assert found == [outcome(self.alone.url, PATH, body) for body in bodies]
        self.wait_ready()
        assert set(engines) - set(self.several[role].children("engine_process")) == {victim}
        for server in (*self.several.values(), *self.ranks.values()):
            server.wait_idle()


def states(server: ModelServer) -> list[str]:
    """Of its engines; none while the server has no other to split the work with."""
    health = httpx.get(f"{server.url}/health", timeout=START_S).json()
    return [engine["state"] for engine in health.get("engines", [])]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = make_model(tmp_path_factory.mktemp("model"), MODEL, layout_of(MODEL)).path
    with (
        running_redis(tmp_path_factory.mktemp("redis")) as redis,
        SplitDeployment(model, redis, **OPTIONS) as deployment,
    ):
        router = deployment.router(timeout_silent=600, timeout_lost=600, timeout_resume=300)
        several = {role: deployment.server(role, BRAKING, pd_timeout=10, **ENGINES) for role in RANKS}
        ranks = {role: deployment.server(role, **options) for role, options in RANKS.items()}
        alone = deployment.server("mixed", router=[], scheduler_name="local")
        found = Engines(deployment, router, several, ranks, alone)
        assert alone.url
        found.wait_ready()
        wait_until(lambda: int(redis.do("HLEN", "tests.cluster")) == NUM_INSTANCES, START_S)
        yield found
        deployment.stop()
        deployment.verify_nothing_left()


def prompts(form: dict[str, Any], max_tokens: int = 40, count: int = 1) -> list[dict[str, Any]]:
    """Requests with new prompts."""
    return [
        {"prompt": [10 + (n * 7919 + i * i) % 240 for i in range(200)], "max_tokens": max_tokens, **form}
        for n in itertools.islice(_numbers, count)
    ]


def test_every_way_to_an_engine_gives_the_bytes_of_one_engine(engines: Engines) -> None:
    bodies = [body for form in FORMS for body in prompts(form, count=2)]
    expected = [outcome(engines.alone.url, PATH, body) for body in bodies]
    for server in (engines.router, engines.several["prefill"], engines.ranks["decode"]):
        with ThreadPoolExecutor(len(bodies)) as pool:
            assert list(pool.map(lambda body: outcome(server.url, PATH, body), bodies)) == expected  # noqa: B023 (here)
    for role, direction in (("prefill", "sent"), ("decode", "received")):
        transfers = f'fastdeploy_sd:kv_transfers_total{{direction="{direction}",'
        assert engines.ranks[role].metric(f'{transfers}protocol="tcp"}}') > 0
        for number in range(2):
            assert engines.several[role].metric(f'{transfers}engine="{number}",protocol="tcp"}}') > 0


@pytest.mark.parametrize("way", ["router", "redis"])
def test_streams_of_a_decode_engine_that_dies_go_on_at_another(engines: Engines, way: str) -> None:
    prefill = engines.several["prefill"]
    url = engines.router.url if way == "router" else prefill.url
    resumed = engines.router.metric("fastdeploy_sd:router_resumed_streams_total")
    moves = prefill.metric("fastdeploy_sd:redis_moves_total")
    engines.verify(url, prompts(FORMS[1], 100, 6), signal.SIGKILL, "decode", 20)
    is_routed = way == "router"
    # Exactly one of the two has them go on: what gave the request to the engine.
    assert (engines.router.metric("fastdeploy_sd:router_resumed_streams_total") > resumed) == is_routed
    assert (prefill.metric("fastdeploy_sd:redis_moves_total") > moves) != is_routed
    assert "leaves engine" not in engines.several["decode"].stderr


def test_streams_of_a_decode_engine_that_hangs_go_on_at_another(engines: Engines) -> None:
    engines.verify(engines.router.url, prompts(FORMS[0], 100, 4), signal.SIGSTOP, "decode", 20)


def test_a_prefill_engine_that_dies_within_a_transfer_costs_time_only(engines: Engines) -> None:
    """The other one of its server needs its experts; the prompts go elsewhere, or wait for these."""
    engines.verify(engines.router.url, prompts(FORMS[0], 40, 6), signal.SIGKILL, "prefill", 2)
