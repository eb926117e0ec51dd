"""Prefill and decode servers of several engines, behind a router and over Redis: the bytes of one engine, also when one
of theirs dies or hangs.

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
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.redis_server import running_redis
from tests.server.model_executors import Brake
from tests.server.outcomes import outcome
from tests.server.router_process import Router, wait_until
from tests.server.split_deployment import BRAKING, START_S, ModelServer, SplitDeployment

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
NUM_ENGINES = 2
# Each engine also runs its half of the experts for the other one of its server.
SPREAD = "glm4_moe-tiny"
MODELS: dict[str, dict[str, Any]] = {
    "demo": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    SPREAD: {"speculative_config": {"method": "ngram"}, "enable_expert_parallel": True},
}
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": 16,
    "num_gpu_blocks_override": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
FORMS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.1, "top_p": 0.9},
    {"temperature": 0.8, "seed": 5, "logprobs": 1, "guided_regex": "[a-z ]{900}", "ignore_eos": False},
    {"temperature": 1.0, "seed": 3, "n": 2},
]
_numbers = itertools.count()


@dataclass
class Engines:
    """A deployment of servers with several engines, and a server of one that nothing is done to."""

    deployment: SplitDeployment
    router: Router
    prefill: ModelServer
    decode: ModelServer
    alone: ModelServer
    is_spread: bool

    def wait_ready(self) -> None:
        """Wait until the router has all engines."""
        count = 2 * NUM_ENGINES
        wait_until(lambda: [i["state"] for i in self.router.instances()] == ["available"] * count, START_S)

    def brake(self, role: str) -> Brake:
        return Brake(self.deployment.state, role)

    def verify(self, url: str, bodies: list[dict[str, Any]], number: signal.Signals, role: str, steps: int) -> None:
        """Send requests; when an engine of a role has taken some steps a signal comes to it, and no answer differs."""
        brake = self.brake(role)
        brake.pull(steps)
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = [pool.submit(outcome, url, PATH, body) for body in bodies]
            wait_until(lambda: brake.stopped, START_S)
            assert brake.stopped is not None
            os.kill(brake.stopped, number)
            brake.release()
            found = [answer.result(START_S) for answer in asked]
        self.wait_ready()
        known = [outcome(self.alone.url, PATH, body) for body in bodies]
        if self.is_spread and number is signal.SIGSTOP:
            # Engines wait for the one that hangs, and count as silent too: what has not begun may get a 503.
            found = [answer or right for answer, right in zip(found, known, strict=True)]
        assert found == known
        for server in (self.prefill, self.decode):
            server.wait_idle()


@pytest.fixture(scope="module", params=MODELS)
def engines(
    request: pytest.FixtureRequest, golden_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    name = request.param
    with running_redis(tmp_path_factory.mktemp("redis")) as redis:
        model = name if name == "demo" else golden_dir / name
        with SplitDeployment(model, redis, **OPTIONS) as deployment:
            router = deployment.router(timeout_silent=600, timeout_lost=600, timeout_resume=300)
            several = {"data_parallel_size": NUM_ENGINES, "timeout_engine": 6, "pd_timeout": 10, **MODELS[name]}
            prefill, decode = (deployment.server(role, BRAKING, **several) for role in ("prefill", "decode"))
            alone = deployment.server("mixed", router=[], scheduler_name="local")
            assert all(server.url for server in (prefill, decode, alone))
            found = Engines(deployment, router, prefill, decode, alone, name == SPREAD)
            found.wait_ready()
            wait_until(lambda: int(redis.do("HLEN", "tests.cluster")) == 2 * NUM_ENGINES, START_S)
            yield found
            deployment.stop()


def prompts(form: dict[str, Any], max_tokens: int = 60, count: int = 1) -> list[dict[str, Any]]:
    """Requests with new prompts."""
    return [
        {"prompt": [10 + (n * 7919 + i * i) % 240 for i in range(200)], "max_tokens": max_tokens, **form}
        for n in itertools.islice(_numbers, count)
    ]


def test_every_way_to_an_engine_gives_the_bytes_of_one_engine(engines: Engines) -> None:
    bodies = [body for form in FORMS for body in prompts(form, count=2)]
    expected = [outcome(engines.alone.url, PATH, body) for body in bodies]
    for url in (engines.router.url, engines.prefill.url, engines.decode.url):
        with ThreadPoolExecutor(len(bodies)) as pool:
            assert list(pool.map(lambda body: outcome(url, PATH, body), bodies)) == expected  # noqa: B023 (called here)
    for server in (engines.prefill, engines.decode):
        for number in range(NUM_ENGINES):
            assert server.metric(f'fastdeploy:request_success_total{{engine="{number}"}}') > 0
    assert engines.decode.metric("fastdeploy_sd:supplied_kv_tokens_total") > 200 * len(bodies)


@pytest.mark.parametrize(
    ("engines", "way"), [("demo", "router"), ("demo", "redis"), (SPREAD, "router")], indirect=["engines"]
)
def test_streams_of_a_decode_engine_that_dies_go_on_at_another(engines: Engines, way: str) -> None:
    url = engines.router.url if way == "router" else engines.prefill.url
    resumed = engines.router.metric("fastdeploy_sd:router_resumed_streams_total")
    moves = engines.prefill.metric("fastdeploy_sd:redis_moves_total")
    engines.verify(url, prompts(FORMS[1], 200, 6), signal.SIGKILL, "decode", 20)
    is_routed = way == "router"
    # Exactly one of the two has them go on: what gave the request to the engine.
    assert (engines.router.metric("fastdeploy_sd:router_resumed_streams_total") > resumed) == is_routed
    assert (engines.prefill.metric("fastdeploy_sd:redis_moves_total") > moves) != is_routed
    assert "leaves engine" not in engines.decode.stderr


@pytest.mark.parametrize("engines", [SPREAD], indirect=True)
def test_streams_of_a_decode_engine_that_hangs_go_on_at_another(engines: Engines) -> None:
    engines.verify(engines.router.url, prompts(FORMS[0], 200, 4), signal.SIGSTOP, "decode", 20)


@pytest.mark.parametrize("engines", ["demo"], indirect=True)
def test_a_prefill_engine_that_dies_within_a_transfer_costs_time_only(engines: Engines) -> None:
    engines.verify(engines.router.url, prompts(FORMS[0], 40, 4), signal.SIGKILL, "prefill", 2)
