"""Prefill and decode instances behind two routers, and what happens when one of them dies, hangs or is left.

Real processes over a real model; engines are stopped between two steps, so that each fault happens where it should.
After each: the bytes of an undisturbed server, also of a concurrent stream and of KV that was cached before; every
block is free on both sides; and in the end every process has ended well and nothing is left.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.ports import free_port
from tests.server.abort_storm import MAX_STORMS, is_settled, possessions, storm
from tests.server.answers import Answer
from tests.server.model_executors import Brake
from tests.server.router_process import Router, wait_until
from tests.server.split_deployment import (
    BRAKING,
    START_S,
    ModelServer,
    SplitDeployment,
    family,
    power_off,
    resume,
    suspend,
)

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
PROMPT_TOKENS = 400  # in steps of 32
OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "block_size": 16,
    "num_gpu_blocks_override": 400,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
}
# One that never gives an instance up for being silent, so that a busy machine does not, and one that does.
PATIENT = {"timeout_silent": 600, "timeout_lost": 600, "timeout_resume": 300}
QUICK = {"timeout_silent": 4, "timeout_lost": 4, "timeout_resume": 300}
_numbers = itertools.count()


@dataclass
class Reader:
    """A stream read in a thread of its own."""

    url: str
    body: dict[str, Any]
    answer: Answer = field(default_factory=Answer)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}{COMPLETIONS}", json=self.body, timeout=START_S) as response:
                self.answer.status = response.status_code
                for line in response.iter_lines():
                    self.answer.take_line(line)
        except httpx.HTTPError as error:
            self.answer.broken = repr(error)

    def begun(self) -> Reader:
        """Wait for its first token."""
        wait_until(lambda: self.answer.choices or not self._thread.is_alive(), START_S)
        return self

    def end(self) -> Answer:
        """Wait for its end."""
        self._thread.join(START_S)
        assert not self._thread.is_alive(), "it does not end"
        return self.answer


@dataclass
class Split:
    """The deployment, and a server that nothing is done to.

    Attributes:
        make: starts an instance of a role at a port. brakes: of the roles.
    """

    deployment: SplitDeployment
    patient: Router
    quick: Router
    third: Router
    prefill: ModelServer
    decodes: list[ModelServer]
    alone: ModelServer
    make: Callable[[str, int], ModelServer]
    brakes: dict[str, Brake]
    known: dict[int, Answer] = field(default_factory=dict)  # what it says, by seed

    def release_brakes(self) -> None:
        """All roles go on."""
        for brake in self.brakes.values():
            brake.release()

    def verify(self, answer: Answer, body: dict[str, Any]) -> None:
        """It is what the undisturbed server says."""
        assert answer.is_right, answer
        if body["seed"] not in self.known:
            self.known[body["seed"]] = Reader(self.alone.url, body).end()
        whole = self.known[body["seed"]]
        assert (answer.choices, answer.usage) == (whole.choices, whole.usage)

    def transferring(self, router: Router, body: dict[str, Any]) -> tuple[Reader, ModelServer]:
        """Send a request; some of its KV has been sent, and no more comes. Also returns who waits for it."""
        before = [decode.num_waiting_for_kv() for decode in self.decodes]  # one at its brake may give an old count
        self.brakes["prefill"].pull(3)
        reader = Reader(router.url, body)
        self.stopped("prefill")
        [victim] = [d for d, num in zip(self.decodes, before, strict=True) if d.num_waiting_for_kv() > num]
        return reader, victim

    def streaming(self, router: Router, body: dict[str, Any]) -> tuple[Reader, ModelServer]:
        """Send a request; some tokens have come, and no more come. Also returns who computes it."""
        self.brakes["decode"].pull(5)
        reader = Reader(router.url, body).begun()
        return reader, self.stopped("decode")

    def stopped(self, role: str) -> ModelServer:
        """The instance whose engine has stopped at its brake; waits for one."""
        wait_until(lambda: self.brakes[role].stopped, START_S)
        pid = self.brakes[role].stopped
        return next(server for server in (self.prefill, *self.decodes) if pid in family(server.process.pid))

    def restart(self, server: ModelServer) -> None:
        """Start an instance that was killed again, at its address."""
        again = self.make(server.role, int(server.address.rpartition(":")[2]))
        if server is self.prefill:
            self.prefill = again
        else:
            self.decodes[self.decodes.index(server)] = again

    def settle(self) -> None:
        """All is well again: nothing is left of any request, and KV of new ones comes from the prefill instance."""
        self.deployment.wait_for(self.prefill, *self.decodes)
        before, body = self.total("supplied_kv_tokens_total"), prompt()
        self.verify(Reader(self.patient.url, body).end(), body)
        assert self.total("supplied_kv_tokens_total") >= before + PROMPT_TOKENS - 1
        for server in (self.prefill, *self.decodes):
            server.wait_idle()

    def total(self, name: str) -> float:
        """A metric of both decode instances."""
        return sum(decode.metric(f"fastdeploy_sd:{name}") for decode in self.decodes)


@pytest.fixture(scope="module")
def deployed(golden_dir: Path) -> Iterator[Split]:
    with SplitDeployment(golden_dir / "qwen3-tiny", **OPTIONS) as deployment:
        patient, quick, third = (deployment.router(**options) for options in (PATIENT, QUICK, PATIENT))

        def make(role: str, port: int) -> ModelServer:
            return deployment.server(role, BRAKING, port=port, pd_timeout=6, timeout_graceful_shutdown=60)

        prefill, *decodes = [make(role, free_port()) for role in ("prefill", "decode", "decode")]
        alone = deployment.server("mixed", router=[], max_num_batched_tokens=512)
        brakes = {role: Brake(deployment.state, role) for role in ("prefill", "decode")}
        split = Split(deployment, patient, quick, third, prefill, decodes, alone, make, brakes)
        deployment.wait_for(prefill, *decodes)
        yield split
        deployment.stop()
        deployment.verify_nothing_left()


@pytest.fixture
def split(deployed: Split) -> Iterator[Split]:
    """The deployment, which the test leaves whole."""
    yield deployed
    deployed.release_brakes()
    deployed.settle()


def prompt(max_tokens: int = 30, num_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """A stream of a new prompt."""
    number = next(_numbers)
    ids = [10 + (number * 7919 + i * i) % 3000 for i in range(num_tokens)]
    body = {"prompt": ids, "max_tokens": max_tokens, "seed": number, "temperature": 1.0, "logprobs": 2, "stream": True}
    return body | {"ignore_eos": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


@contextmanager
def canaries(split: Split) -> Iterator[None]:
    """Streams run during what happens in the block, and KV is cached: afterwards both are as ever."""
    cached, concurrent = prompt(num_tokens=300), prompt(max_tokens=300, num_tokens=40)
    for server in split.decodes:
        split.verify(Reader(server.url, cached).end(), cached)
    is_over = threading.Event()

    def repeat(url: str) -> list[Answer]:
        answers = [Reader(url, concurrent).end()]
        while not is_over.is_set():
            answers.append(Reader(url, concurrent).end())
        return answers

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(repeat, server.url) for server in split.decodes]
        try:
            yield
        finally:
            is_over.set()
    for answer in (answer for answers in running for answer in answers.result()):
        split.verify(answer, concurrent)
    for server in split.decodes:
        hits = server.metric("fastdeploy:prefix_cache_token_num_total ")
        split.verify(Reader(server.url, cached).end(), cached)
        assert server.metric("fastdeploy:prefix_cache_token_num_total ") >= hits + 288


# ---- prefill instances ----------------------------------------------------------------------------------------------


def test_one_killed_before_a_transfer_costs_time_only(split: Split) -> None:
    with canaries(split):
        before, body = split.total("kv_failures_total"), prompt()
        suspend(split.prefill)
        reader = Reader(split.patient.url, body)
        wait_until(lambda: split.total("num_requests_waiting_for_kv "), START_S)
        power_off(split.prefill)
        split.verify(reader.end(), body)
        assert split.total("kv_failures_total") == before + 1
        split.restart(split.prefill)


def test_one_killed_within_a_transfer_costs_time_only(split: Split) -> None:
    with canaries(split):
        before, body = split.total("kv_failures_total"), prompt()
        reader, _ = split.transferring(split.patient, body)
        power_off(split.prefill)
        split.verify(reader.end(), body)
        assert split.total("kv_failures_total") == before + 1
        split.restart(split.prefill)


def test_one_killed_after_a_transfer_is_not_missed(split: Split) -> None:
    before, body = split.total("kv_failures_total"), prompt()
    reader, _ = split.streaming(split.patient, body)
    power_off(split.prefill)
    split.brakes["decode"].release()
    split.verify(reader.end(), body)
    assert split.total("kv_failures_total") == before
    split.restart(split.prefill)


def test_one_suspended_within_a_transfer_costs_time_and_comes_back(split: Split) -> None:
    with canaries(split):
        before, body = split.total("kv_failures_total"), prompt()
        reader, _ = split.transferring(split.patient, body)
        suspend(split.prefill)
        split.verify(reader.end(), body)
        assert split.total("kv_failures_total") == before + 1
        split.brakes["prefill"].release()
        resume(split.prefill)


# ---- decode instances -----------------------------------------------------------------------------------------------


def test_a_request_whose_decode_instance_is_killed_within_its_transfer_goes_to_the_other(split: Split) -> None:
    body = prompt()
    reader, victim = split.transferring(split.patient, body)
    power_off(victim)
    split.brakes["prefill"].release()
    split.verify(reader.end(), body)
    split.restart(victim)


def test_a_request_whose_decode_instance_hangs_within_its_transfer_goes_to_the_other(split: Split) -> None:
    body = prompt()
    reader, victim = split.transferring(split.quick, body)
    suspend(victim)
    split.brakes["prefill"].release()
    split.verify(reader.end(), body)
    resume(victim)


def test_a_stream_whose_decode_instance_is_killed_goes_on_at_the_other(split: Split) -> None:
    body = prompt(max_tokens=200)
    reader, victim = split.streaming(split.patient, body)
    power_off(victim)
    split.brakes["decode"].release()
    split.verify(reader.end(), body)
    split.restart(victim)


def test_a_stream_whose_decode_instance_hangs_goes_on_at_the_other(split: Split) -> None:
    before, body = split.quick.metric("fastdeploy_sd:router_resumed_streams_total"), prompt(max_tokens=200)
    reader, victim = split.streaming(split.quick, body)
    suspend(victim)
    split.brakes["decode"].release()
    split.verify(reader.end(), body)
    assert split.quick.metric("fastdeploy_sd:router_resumed_streams_total") == before + 1
    resume(victim)


# ---- routers and clients --------------------------------------------------------------------------------------------


def test_a_router_that_dies_takes_its_streams_along_and_the_others_go_on(split: Split) -> None:
    """What was under way through it is freed, at both ends of a transfer too."""
    victim = split.third
    streaming, _ = split.streaming(victim, prompt(max_tokens=1500))
    transferring, _ = split.transferring(victim, prompt(max_tokens=1500))
    power_off(victim)
    split.release_brakes()  # not before, as either stream would have all its tokens soon
    split.third = split.deployment.router(port=int(victim.address.rpartition(":")[2]), **PATIENT)
    for reader in (streaming, transferring):
        answer = reader.end()
        assert answer.broken, "a stream that ended says so"
        assert not answer.is_done
    bodies = [prompt(), prompt()]
    readers = [Reader(router.url, body) for router, body in zip((split.patient, split.quick), bodies, strict=True)]
    for reader, body in zip(readers, bodies, strict=True):
        split.verify(reader.end(), body)


def test_a_client_that_leaves_within_a_transfer_frees_both_sides(split: Split) -> None:
    with canaries(split):
        before = split.total("kv_cancels_total")
        content = json.dumps(prompt()).encode()
        split.brakes["prefill"].pull(3)
        host, port = split.patient.address.split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content)
            split.stopped("prefill")
            assert split.total("num_requests_waiting_for_kv ") == 1
        wait_until(lambda: split.total("num_requests_waiting_for_kv ") == 0, START_S)
        assert split.total("kv_cancels_total") == before + 1
        split.brakes["prefill"].release()


def test_hundreds_of_clients_that_leave_leave_nothing(split: Split) -> None:
    """Behind a router; many leave while KV is on its way."""
    programs = (split.patient, split.prefill, *split.decodes)
    has: list[list[tuple[int, int]]] = []
    before = split.total('requests_finished_total{reason="abort"}')
    for seed in range(MAX_STORMS):
        bodies = [prompt(200, num_tokens=100) | {"n": 4} for _ in range(150)]
        seconds = asyncio.run(storm(split.patient.url, bodies, seed))
        for server in (split.prefill, *split.decodes):
            server.wait_idle()
        has.append([possessions(program) for program in programs])
        aborted = split.total('requests_finished_total{reason="abort"}') - before
        print(f"{len(bodies)} connections in {seconds:.1f} s; {aborted:.0f} requests aborted so far")
        if aborted > 100 and is_settled(has):
            break
    else:
        pytest.fail(f"{aborted:.0f} requests aborted; KiB and files after each storm: {has}")
