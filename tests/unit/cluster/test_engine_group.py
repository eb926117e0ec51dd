"""Engines of one server: who takes a request, and what happens to it when its engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from fastdeploy_sd.cluster import readiness
from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.errors import BadRequest, ConfigError, InternalError, NotFound, Overloaded, Unavailable
from fastdeploy_sd.types import FinishReason, Request, SchedulerOutput
from fastdeploy_sd.wire.channel import private_address
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.toy_adapters import ToyAdapters, adapter_of
from tests.doubles.toy_model import ToyModel
from tests.unit.engine.ipc.hosts import ENDLESS, WAIT_S, Host, dawdle, tokens_of, until

pytestmark = pytest.mark.slow


class Engines:
    """Engine loops in threads at the addresses of a group, which can be ended and started again."""

    def __init__(self, addresses: list[str], max_num_queued_requests: int) -> None:
        self.before_step = dawdle
        self._config = toy_config(max_num_queued_requests=max_num_queued_requests, max_num_seqs=2)
        self.addresses = addresses
        self.hosts: dict[int, Host] = {}
        self.files: dict[int, ToyAdapters] = {}

    def start(self, number: int) -> None:
        info, files = toy_info(num_blocks=4096, num_adapter_slots=2), self.files.setdefault(number, ToyAdapters())
        self.hosts[number] = Host(self.addresses[number], self._config, info, self.before_step, WAIT_S, files)

    async def revive(self) -> None:
        """Start again what has ended."""
        for number in [number for number, host in self.hosts.items() if host.status is not None]:
            await self.hosts.pop(number).ended()
            self.start(number)

    async def end(self, number: int) -> None:
        """Requests end with an error."""
        host = self.hosts.pop(number)
        host.loop.end_now()
        await host.ended()


@asynccontextmanager
async def group_of(
    count: int,
    timeout_s: float | None = 60.0,
    max_num_queued_requests: int = 1000,
    *,
    shares_experts: bool = False,
) -> AsyncIterator[tuple[EngineGroup, Engines]]:
    async with AsyncExitStack() as stack:
        address = stack.enter_context(private_address())
        engines = Engines([f"{address}-{number}" for number in range(count)], max_num_queued_requests)
        for number in range(count):
            engines.start(number)
        group = EngineGroup(engines.addresses, timeout_s, shares_experts=shares_experts)
        try:
            await asyncio.wait_for(group.connect(to_all=True), WAIT_S)
            yield group, engines
        finally:
            await group.close()
            await group.close()  # harmless
            for number in list(engines.hosts):
                await engines.end(number)


def is_running(engines: Engines, number: int, count: int) -> bool:
    """Whether an engine has so many requests."""
    return running(engines)[number] == count


class Reader:
    """Reads a request to its end."""

    def __init__(self, group: EngineGroup, request: Request, engine: int | None = None) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.task = asyncio.create_task(self._read(group, request, engine))

    async def _read(self, group: EngineGroup, request: Request, engine: int | None) -> None:
        async for output in group.generate(request, engine):
            self.tokens += output.token_ids
            self.reason = output.finish_reason

    async def read(self) -> list[int]:
        """Wait for its end; return its tokens."""
        await asyncio.wait_for(self.task, WAIT_S)
        return self.tokens

    async def begun(self, num_tokens: int = 1) -> None:
        await until(lambda: len(self.tokens) >= num_tokens or self.task.done(), "tokens")


def running(engines: Engines) -> list[int]:
    return [len(host.loop._clients.request_ids()) for _, host in sorted(engines.hosts.items())]


async def test_requests_are_shared_out_evenly_and_beginnings_meet_again() -> None:
    async with group_of(3) as (group, engines):
        readers = [Reader(group, toy_request(f"r{i}", [5 + i], max_tokens=ENDLESS)) for i in range(6)]
        for reader in readers:
            await reader.begun()
        assert running(engines) == [2, 2, 2]
        await group.abort([f"r{i}" for i in range(6)])
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), WAIT_S)
        prompt = range(3, 90)
        for name in "abcd":
            assert len(tokens_of([o async for o in group.generate(toy_request(name, prompt, max_tokens=2))])) == 2
        stats = await group.stats()
        assert sorted(s.num_prefix_hits for s in stats.values()) == [0, 0, 3]


async def test_a_request_goes_on_at_another_engine_with_the_same_tokens() -> None:
    async with group_of(2) as (group, engines):
        requests = [toy_request(f"r{i}", [5 + i, 6], max_tokens=300) for i in range(4)]
        readers = [Reader(group, request) for request in requests]
        for reader in readers:
            await reader.begun(20)
        assert running(engines) == [2, 2]
        await engines.end(0)
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), WAIT_S)
        for request, reader in zip(requests, readers, strict=True):
            assert reader.tokens == ToyModel(97).generate(request)
            assert reader.reason is FinishReason.LENGTH
        assert [state.name for state in group.states] == ["down", "ready"]
        group.verify_takes_requests()
        assert set(await group.stats()) == {1}
        engines.start(0)
        await until(lambda: group.states[0].name == "ready", "the engine that was started again")
        assert group.model_infos[0] == group.model_infos[1]


async def test_a_request_waits_for_the_successor_of_the_last_engine() -> None:
    async with group_of(2) as (group, engines):
        await engines.end(1)
        request = toy_request("r", [5, 6], max_tokens=200)
        reader = Reader(group, request)
        await reader.begun(20)
        await engines.end(0)
        with pytest.raises(Unavailable) as caught:
            await group.verify_healthy()
        assert caught.value.code == "engine_down"
        await asyncio.sleep(0.2)
        assert not reader.task.done()
        engines.start(1)
        await asyncio.wait_for(reader.task, WAIT_S)
        assert reader.tokens == ToyModel(97).generate(request)


async def test_new_requests_wait_for_an_engine_so_long_and_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_MAX_HELD", 2)
    async with group_of(2, timeout_s=1.0) as (group, engines):
        for number in (0, 1):
            await engines.end(number)
        held = [Reader(group, toy_request(f"r{i}", [5, 6], max_tokens=20)) for i in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(Unavailable, match="2 requests wait") as caught:
            await Reader(group, toy_request("r2", [5, 6])).task
        assert caught.value.code == "engine_down"
        engines.start(1)
        for reader in held:
            assert await reader.read() == ToyModel(97).generate(toy_request("r", [5, 6], max_tokens=20))
        await engines.end(1)
        late = Reader(group, toy_request("r3", [5, 6]))
        with pytest.raises(Unavailable, match="engine is down"):
            await asyncio.wait_for(late.task, WAIT_S)
        with pytest.raises(Unavailable, match="engine is down"):
            group.verify_takes_requests()


async def test_a_request_that_ends_engines_ends_and_the_others_go_on() -> None:
    ended: list[int] = []

    def break_down(plan: SchedulerOutput) -> None:
        dawdle(plan)
        if "bad" in plan.request_ids:
            ended.append(len(plan.request_ids))
            raise RuntimeError("a bad request")

    async with group_of(2) as (group, engines):
        engines.before_step = break_down
        for number in (0, 1):
            await engines.end(number)
            engines.start(number)
        await until(lambda: [state.name for state in group.states] == ["ready", "ready"], "both")
        requests = [toy_request(f"r{i}", [5 + i, 6], max_tokens=200) for i in range(4)]
        readers = [Reader(group, request) for request in requests]
        for reader in readers[:2]:
            await reader.begun(20)
        bad = Reader(group, toy_request("bad", [3], max_tokens=50))
        while not bad.task.done():
            await engines.revive()
            await asyncio.sleep(0.01)
        with pytest.raises(InternalError, match="4 engines ended"):
            await bad.task
        assert len(ended) == 4
        for request, reader in zip(requests, readers, strict=True):
            assert await reader.read() == ToyModel(97).generate(request)


async def test_a_request_waits_no_longer_than_the_timeout() -> None:
    async with group_of(2, timeout_s=None) as (group, engines):
        await engines.end(1)
        reader = Reader(group, toy_request("r", [5, 6], max_tokens=ENDLESS))
        await reader.begun()
        await engines.end(0)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(reader.task, WAIT_S)


async def test_a_request_of_one_engine_stays_there() -> None:
    async with group_of(2) as (group, engines):
        readers = [Reader(group, toy_request(f"r{i}", [5], max_tokens=ENDLESS), engine=1) for i in range(4)]
        await readers[0].begun()
        await until(lambda: running(engines) == [0, 4], "all four at engine 1")
        await engines.end(1)
        for reader in readers:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(reader.task, WAIT_S)


async def test_a_request_that_its_reader_ends_goes_nowhere_else() -> None:
    """A stop string may end its text just when the engine is lost."""
    async with group_of(2) as (group, engines):
        outputs = group.generate(toy_request("r", [5], max_tokens=ENDLESS))
        await anext(outputs)
        await engines.end(running(engines).index(1))
        await group.abort(["r"], FinishReason.STOP)
        with pytest.raises(Unavailable):
            _ = [output async for output in outputs]
        assert running(engines) == [0]


async def test_a_full_engine_is_passed_over_and_all_full_ones_are_an_error() -> None:
    async with group_of(2, max_num_queued_requests=1) as (group, engines):
        readers = []
        for number in (0, 1):
            for i in range(3):
                request = toy_request(f"{number}.{i}", [5], max_tokens=ENDLESS)
                readers.append(Reader(group, request, None if number else 0))
                await until(partial(is_running, engines, number, i + 1), "a request")
                if i < 2:
                    await readers[-1].begun()
        with pytest.raises(Overloaded):
            await asyncio.wait_for(Reader(group, toy_request("x", [7])).task, WAIT_S)
        await group.abort([f"{number}.{i}" for number in (0, 1) for i in range(3)])
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), WAIT_S)


async def test_a_drain_ends_the_group_after_its_engines() -> None:
    async with group_of(2) as (group, engines):
        reader = Reader(group, toy_request("r", [5], max_tokens=200))
        await reader.begun()
        group.begin_drain()
        for host in engines.hosts.values():
            host.loop.drain()
        with pytest.raises(Unavailable) as caught:
            group.verify_takes_requests()
        assert caught.value.code == "draining"
        await asyncio.wait_for(group.wait_ended(), WAIT_S)
        await asyncio.wait_for(reader.task, WAIT_S)
        assert reader.reason is FinishReason.LENGTH


async def test_a_group_whose_only_engine_ends_has_ended() -> None:
    async with group_of(1) as (group, engines):
        reader = Reader(group, toy_request("r", [5], max_tokens=ENDLESS))
        await reader.begun()
        await engines.end(0)
        await asyncio.wait_for(group.wait_ended(), WAIT_S)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(reader.task, WAIT_S)
        assert len(group.states) == 1


@pytest.mark.parametrize("shares_experts", [True, False])
async def test_engines_may_wait_for_the_experts_of_one_that_is_being_started(shares_experts: bool) -> None:
    async with group_of(2, shares_experts=shares_experts) as (group, engines):
        client = group._engines[1].client
        assert client is not None
        assert not client.may_wait()
        await engines.end(0)
        await until(lambda: group.states[0].name == "down", "the end of the first engine")
        assert client.may_wait() == shares_experts
        engines.start(0)
        await until(lambda: group.states[0].name == "ready", "the engine that was started again")
        assert not client.may_wait()


def names(group: EngineGroup) -> list[str]:
    return [source.adapter.name for source in group.model_info.adapters]


async def test_an_adapter_is_loaded_in_all_engines_or_in_none() -> None:
    async with group_of(2) as (group, engines):
        engines.files[1].contents = {"x": "x"}
        with pytest.raises(ConfigError, match="y: expected adapter_config"):
            await group.change_adapter("y", "y")
        await until(lambda: names(group) == [], "that none has it")
        await group.change_adapter("x", "x")
        assert names(group) == ["x"]
        with pytest.raises(BadRequest, match="in use"):
            await group.change_adapter("x", "x")
        request = replace(toy_request("r", [5, 6], 9), adapter=adapter_of("x"))
        for number in (0, 1):
            one = replace(request, request_id=f"r{number}")
            assert await Reader(group, one, number).read() == ToyModel(97).generate(request)
        with pytest.raises(NotFound, match="expected an adapter that is loaded"):
            await Reader(group, replace(request, adapter=adapter_of("z"))).read()
        await group.change_adapter("x", None)
        assert names(group) == []
        with pytest.raises(NotFound, match="expected a loaded adapter, got 'x'"):
            await group.change_adapter("x", None)


async def test_an_engine_that_was_lost_gets_the_adapters_before_requests() -> None:
    async with group_of(2) as (group, engines):
        await group.change_adapter("x", "x")
        await group.change_adapter("y", "y")
        await engines.end(1)
        await until(lambda: [state.name for state in group.states] == ["ready", "down"], "the loss")
        with pytest.raises(Unavailable):
            await group.change_adapter("z", "z")
        assert names(group) == ["x", "y"]
        engines.files[1].contents = {"x": "x"}  # y is gone
        engines.start(1)
        await until(lambda: [state.name for state in group.states] == ["ready", "ready"], "the successor")
        assert [[s.adapter.name for s in host.engine.adapters.known] for _, host in sorted(engines.hosts.items())] == [
            ["x", "y"],
            ["x"],
        ]
        for name in ("x", "y"):
            requests = [replace(toy_request(f"{name}{i}", [5, 6, i], 9), adapter=adapter_of(name)) for i in range(4)]
            readers = [Reader(group, request) for request in requests]
            assert [await reader.read() for reader in readers] == [ToyModel(97).generate(r) for r in requests]
