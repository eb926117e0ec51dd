"""Prefill and decode engines as real processes over real sockets: the bytes of one engine, also when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Reference, compare, make_reference, standard_methods
from fastdeploy_sd.cli.verify.answers import Answer, AnswerCollector
from fastdeploy_sd.cli.verify.runs import engine_config
from fastdeploy_sd.config import Config, ModelConfig, ParallelConfig, SplitwiseConfig
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.engine.ipc.engine_process import start_engine
from fastdeploy_sd.entrypoints.engine_pools import ENGINE
from fastdeploy_sd.entrypoints.launch import DEFAULT_EXECUTOR
from fastdeploy_sd.errors import InternalError, Unavailable
from fastdeploy_sd.process.child import ChildProcess
from fastdeploy_sd.types import KvSource, Request, RequestId
from fastdeploy_sd.wire.channel import private_address
from tests.models.mtp_models import make_model

pytestmark = pytest.mark.slow

WAIT_S = 120.0
WAY = EngineVariant(
    "processes", max_num_seqs=9, long_prefill_token_threshold=32, enable_prefix_caching=True, num_threads=1
)
SECRET = "a secret of at least 16 characters"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return make_reference(Config(ModelConfig(model="demo", dtype="bfloat16")), seed=3, count=24)


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Of a model with recurrent states and a random MTP layer."""
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3_5-tiny", "qwen").path
    return make_reference(Config(ModelConfig(model=str(path), dtype="bfloat16")), seed=3, count=24)


@dataclass
class Instance:
    """An engine process and a client of it."""

    process: ChildProcess
    client: EngineClient

    @property
    def source(self) -> KvSource:
        return KvSource("p", self.client.model_info.kv_address)

    async def run(self, requests: Sequence[Request], source: KvSource | None) -> dict[RequestId, Answer]:
        """Run requests at once; returns their answers."""
        collector = AnswerCollector()

        async def one(request: Request) -> None:
            async for output in self.client.generate(replace(request, kv_source=source)):
                collector.add(output)

        await asyncio.wait_for(asyncio.gather(*map(one, requests)), WAIT_S)
        return {request.request_id: collector.answer(request.request_id) for request in requests}

    def rank(self) -> tuple[int, int]:
        """Return the process id of the other of two ranks, and a descriptor that is readable once it has ended."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [pid] = [int(pid) for pid in children if "distributed.process" in Path(f"/proc/{pid}/cmdline").read_text()]
        return pid, os.pidfd_open(pid)

    async def wait_until_idle(self) -> None:
        """Wait until it has nothing to do and all blocks are free."""
        async with asyncio.timeout(WAIT_S):
            while (stats := await self.client.stats()).num_running + stats.num_waiting > 0 or (
                stats.num_free_blocks + stats.num_cached_blocks < stats.num_blocks
            ):
                await asyncio.sleep(0.05)

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit status."""
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


@contextlib.asynccontextmanager
async def instance(
    reference: Reference, role: str, method: str, num_drafts: int, protocol: str, num_ranks: int = 1, **cache: object
) -> AsyncIterator[Instance]:
    """Start an engine process in a role; it is ended, and leaves nothing, at the end."""
    [found] = standard_methods([method], [num_drafts], model_method="mtp")
    config = engine_config(reference.base, WAY, found)
    splitwise = SplitwiseConfig(
        splitwise_role=role,  # type: ignore[arg-type]
        cache_transfer_protocol=(protocol,),
        pd_secret=SECRET,
        pd_host="127.0.0.1",
        pd_timeout_s=60.0,
    )
    config = replace(
        config,
        splitwise=splitwise,
        cache=replace(config.cache, **cache),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, rank_timeout_s=60.0),
    )
    with (
        private_address() as address,
        contextlib.closing(start_engine(config, address, DEFAULT_EXECUTOR, ENGINE)) as process,
    ):
        client = EngineClient(address)
        try:
            await asyncio.wait_for(client.connect(), WAIT_S)
            yield Instance(process, client)
        finally:
            await client.close()


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
async def test_two_processes_give_the_bytes_of_one_engine(reference: Reference, protocol: str) -> None:
    async with (
        instance(reference, "prefill", "mtp", 1, protocol) as prefill,
        instance(reference, "decode", "mtp-ngram", 4, protocol) as decode,
    ):
        assert prefill.client.model_info.fingerprint == decode.client.model_info.fingerprint != ""
        assert decode.client.model_info.kv_address == ""
        assert compare(reference.answers, await decode.run(reference.requests, prefill.source)) is None
        stats, source = await decode.client.stats(), await prefill.client.stats()
        assert stats.num_supplied_tokens["prefill"] > 300
        assert sum(stats.drafts["handed_over"].accepted) > 5
        assert stats.num_waiting_for_kv == source.num_running == 0
        assert source.num_finished["length"] == source.num_requests == stats.num_kv_arrivals
        for end in (prefill, decode):
            os.kill(end.process.pid, signal.SIGTERM)
            assert await end.ended() == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_prefill_instance_that_ends_costs_nobody_a_token(reference: Reference, how: signal.Signals) -> None:
    async with (
        instance(reference, "prefill", "mtp", 2, "tcp") as prefill,
        instance(reference, "decode", "mtp", 2, "tcp") as decode,
    ):
        source = prefill.source
        first = asyncio.create_task(decode.run(reference.requests, source))
        while (await decode.client.stats()).num_waiting_for_kv == 0 and not first.done():
            await asyncio.sleep(0.001)
        os.kill(prefill.process.pid, how)
        assert compare(reference.answers, await first) is None
        assert (await prefill.ended() == 0) == (how is signal.SIGTERM)
        again = [replace(request, request_id=f"{request.request_id}-again") for request in reference.requests]
        got = await decode.run(again, source)
        expected = {f"{name}-again": answer for name, answer in reference.answers.items()}
        assert compare(expected, got) is None
        stats = await decode.client.stats()
        assert (stats.num_waiting_for_kv, stats.num_running) == (0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.mark.parametrize(("protocol", "num_ranks"), [("ipc", 1), ("tcp", 2)])
async def test_states_come_with_the_prompt_or_are_computed(
    with_states: Reference, protocol: str, num_ranks: int
) -> None:
    """Then the prefill instance dies while some are on their way."""
    async with (
        instance(with_states, "prefill", "mtp", 2, protocol, num_ranks) as prefill,
        instance(with_states, "decode", "mtp-ngram", 4, protocol) as decode,
    ):
        assert compare(with_states.answers, await decode.run(with_states.requests, prefill.source)) is None
        stats = await decode.client.stats()
        assert stats.num_supplied_tokens["prefill"] > 300
        assert sum(stats.num_kv_failures.values()) == 0
        requests, expected = anew(with_states.requests, with_states, 1)
        again = asyncio.create_task(decode.run(requests, prefill.source))
        while (await decode.client.stats()).num_waiting_for_kv == 0 and not again.done():
            await asyncio.sleep(0.001)
        os.kill(prefill.process.pid, signal.SIGKILL)
        assert compare(expected, await again) is None
        stats = await decode.client.stats()
        assert sum(stats.num_kv_failures.values()) > 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.mark.parametrize("ends", [False, True])
async def test_both_keep_what_their_memory_has_no_room_for(reference: Reference, ends: bool) -> None:
    """A second level of the prefix cache at both: what it lacks comes from the prefill instance, if that is there."""
    cache: dict[str, object] = {"swap_space": 0.05, "num_blocks": 30}
    async with (
        instance(reference, "prefill", "mtp", 2, "ipc", 1, **cache) as prefill,
        instance(reference, "decode", "mtp", 2, "ipc", 1, **cache) as decode,
    ):
        for time in range(3):
            again = [replace(request, request_id=f"{request.request_id} {time}") for request in reference.requests]
            expected = {f"{name} {time}": answer for name, answer in reference.answers.items()}
            if ends and time == 1:
                os.kill(prefill.process.pid, signal.SIGKILL)
            assert compare(expected, await decode.run(again, prefill.source)) is None
        stats = await decode.client.stats()
        assert stats.num_supplied_tokens["prefill"] > 100
        assert stats.num_supplied_tokens["swap"] > 100
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        for end in (decode,) if ends else (decode, prefill):
            os.kill(end.process.pid, signal.SIGTERM)
            assert await end.ended() == 0


async def test_instances_that_do_not_fit_compute_for_themselves(reference: Reference, tmp_path: Path) -> None:
    async with (
        instance(reference, "prefill", "naive", 1, "tcp", kv_cache_dtype="int8") as prefill,
        instance(reference, "decode", "mtp", 2, "tcp") as decode,
    ):
        assert prefill.client.model_info.fingerprint != decode.client.model_info.fingerprint
        assert compare(reference.answers, await decode.run(reference.requests, prefill.source)) is None
        stats = await decode.client.stats()
        assert stats.num_kv_arrivals > 0
        assert sum(stats.num_supplied_tokens.values()) == 0
        assert stats.num_kv_failures == {"refused": stats.num_kv_arrivals}
        assert (await prefill.client.stats()).num_requests == 0


async def test_a_rank_of_the_prefill_instance_that_dies_costs_nobody_a_token(reference: Reference) -> None:
    async with (
        instance(reference, "prefill", "mtp", 2, "ipc", num_ranks=2) as prefill,
        instance(reference, "decode", "mtp-ngram", 4, "ipc") as decode,
    ):
        (pid, end), source, is_dead = prefill.rank(), prefill.source, False

        async def ask_again_and_again() -> None:
            """Until a round has begun after the rank's end."""
            for serial in itertools.count():
                is_last = is_dead
                requests, expected = anew(reference.requests, reference, serial)
                assert compare(expected, await decode.run(requests, source)) is None
                if is_last:
                    return

        running = asyncio.create_task(ask_again_and_again())
        while (await decode.client.stats()).num_waiting_for_kv == 0 and not running.done():
            await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        is_dead = True
        await asyncio.wait_for(running, WAIT_S)
        assert await prefill.ended() == 1
        assert select.select([end], [], [], WAIT_S)[0]
        os.close(end)
        await decode.wait_until_idle()
        assert sum((await decode.client.stats()).num_kv_failures.values()) > 0


async def test_a_rank_of_the_decode_instance_that_dies_is_an_error_and_orders_nothing_more(
    reference: Reference,
) -> None:
    async with (
        instance(reference, "prefill", "mtp", 2, "tcp") as prefill,
        instance(reference, "decode", "mtp", 2, "tcp", num_ranks=2) as decode,
    ):
        (pid, end), source = decode.rank(), prefill.source

        async def ask_again_and_again(request: Request) -> None:
            for serial in itertools.count():
                requests, expected = anew([request], reference, serial)
                assert compare(expected, await decode.run(requests, source)) is None

        running = asyncio.gather(*map(ask_again_and_again, reference.requests), return_exceptions=True)
        while (await decode.client.stats()).num_kv_arrivals == 0:
            await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        errors = {type(error) for error in await asyncio.wait_for(running, WAIT_S)}
        # Who asks when it has ended is told so.
        assert {InternalError} <= errors <= {InternalError, Unavailable}
        assert await decode.ended() == 1
        assert select.select([end], [], [], WAIT_S)[0]
        os.close(end)
        await prefill.wait_until_idle()


def anew(
    requests: Sequence[Request], reference: Reference, serial: int
) -> tuple[list[Request], dict[RequestId, Answer]]:
    """Requests that find nothing in a prefix cache, and their answers."""
    salted = [replace(r, request_id=f"{serial} {r.request_id}", cache_salt=str(serial)) for r in requests]
    return salted, {f"{serial} {r.request_id}": reference.answers[r.request_id] for r in requests}
