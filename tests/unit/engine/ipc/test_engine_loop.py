"""The engine loop over real sockets: who gets what, and when requests are freed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.errors import BadRequest, InternalError, Overloaded, Unavailable
from fastdeploy_sd.types import FinishReason, ModelInfo, SchedulerOutput
from fastdeploy_sd.types.experts import ExpertReport, ExpertStats
from fastdeploy_sd.wire.channel import ClientChannel
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.toy_adapters import ToyAdapters, adapter_of
from tests.doubles.toy_model import ToyModel, toy_prompt
from tests.unit.engine.ipc.hosts import (
    ENDLESS,
    WAIT_S,
    Gate,
    collect,
    connected,
    dawdle,
    hosted,
    tokens_of,
    until,
    until_idle,
    until_stats,
)

MODEL = ToyModel(97)


class RawClient:
    """Speaks the protocol by hand, also wrongly."""

    def __init__(self, address: str) -> None:
        self.channel = ClientChannel(address)

    def send(self, message: m.Message) -> None:
        self.channel.send(m.encode(message))

    async def receive(self) -> m.Message:
        return m.decode(await asyncio.wait_for(self.channel.receive(), WAIT_S))

    async def greet(self) -> None:
        self.send(m.ClientHello(os.getpid()))
        assert isinstance(await self.receive(), m.EngineReady)

    def vanish(self) -> None:
        self.channel.close(linger_s=0)


async def test_generate_yields_the_models_tokens_and_one_end() -> None:
    async with hosted() as host, connected(host) as client:
        request = toy_request("a", [5, 6, 7], max_tokens=9)
        outputs = await collect(client, request)
        assert tokens_of(outputs) == MODEL.generate(request)
        assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
        assert client.model_info == host.executor.model_info


async def test_rejections_reach_the_caller_as_their_own_class() -> None:
    config = toy_config(max_num_seqs=1, max_num_queued_requests=1)
    async with hosted(config=config, before_step=dawdle) as host, connected(host) as client:
        with pytest.raises(BadRequest, match="max_tokens") as impossible:
            await collect(client, toy_request("big", [5], max_tokens=100_000))
        assert impossible.value.param == "max_tokens"
        running = client.generate(toy_request("a", [5, 6], max_tokens=ENDLESS))
        await anext(running)
        with pytest.raises(BadRequest, match="request_id"):
            await collect(client, toy_request("a", [5, 6]))
        waiting = asyncio.create_task(collect(client, toy_request("b", [5, 6])))
        await until_stats(client, lambda stats: stats.num_waiting == 1)
        with pytest.raises(Overloaded, match="queue") as full:
            await collect(client, toy_request("c", [5, 6]))
        assert full.value.retry_after_s >= 1
        await running.aclose()
        assert tokens_of(await waiting) == MODEL.generate(toy_request("b", [5, 6]))


async def test_requests_go_on_while_an_adapter_is_read() -> None:
    may_read = threading.Event()

    class Files(ToyAdapters):
        def digest(self, folder: Path) -> str:
            assert may_read.wait(WAIT_S)
            return super().digest(folder)

    info = toy_info(num_blocks=4096, num_adapter_slots=1)
    async with hosted(info=info, adapters=Files()) as host, connected(host) as client:
        loading = asyncio.create_task(client.change_adapter("x", "x"))
        await until(lambda: host.engine.adapters._num_begun, "the load")
        with pytest.raises(BadRequest, match="in use, got 'x'"):
            await client.change_adapter("x", "y")
        request = toy_request("a", [5, 6, 7], max_tokens=90)
        assert tokens_of(await collect(client, request)) == MODEL.generate(request)
        assert not loading.done()
        may_read.set()
        assert (await loading).adapter == adapter_of("x")
        assert [source.adapter.name for source in client.model_info.adapters] == ["x"]


async def test_an_accident_while_an_adapter_is_read_ends_nothing_else() -> None:
    class Files(ToyAdapters):
        def digest(self, folder: Path) -> str:
            if folder.name == "y":
                raise MemoryError
            return super().digest(folder)

    info = toy_info(num_blocks=4096, num_adapter_slots=1)
    async with hosted(info=info, adapters=Files()) as host, connected(host) as client:
        with pytest.raises(InternalError, match="the adapter could not be read"):
            await client.change_adapter("y", "y")
        assert (await client.change_adapter("y", "x")).adapter.name == "y"


async def test_closing_the_iterator_frees_the_request_and_its_id() -> None:
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        leaving = client.generate(toy_request("a", [5, 6], max_tokens=ENDLESS))
        await anext(leaving)
        await leaving.aclose()
        again = toy_request("a", [1, 2])
        assert tokens_of(await collect(client, again)) == MODEL.generate(again)  # nothing of its first life
        assert (await client.stats()).num_finished["abort"] == 1


async def test_abort_ends_the_stream_with_an_abort_output() -> None:
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        stream = client.generate(toy_request("a", [5, 6], max_tokens=ENDLESS))
        await anext(stream)
        await client.abort(["a", "unknown"])
        rest = [output async for output in stream]
        assert rest[-1].finish_reason is FinishReason.ABORT


async def test_cancelling_the_reading_task_frees_the_request() -> None:
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        first = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate(toy_request("a", [5, 6], max_tokens=ENDLESS)):
                first.set()

        task = asyncio.create_task(read())
        await first.wait()
        task.cancel()
        await until_idle(client)
        assert (await client.stats()).num_finished["abort"] == 1


async def test_unreadable_and_misplaced_messages_get_a_fault_and_harm_nobody() -> None:
    async with hosted() as host, connected(host) as client:
        raw = RawClient(host.address)
        raw.send(m.StatsRequest(1))
        assert isinstance(await raw.receive(), m.Fault)  # no Hello yet
        await raw.greet()
        for frame in (b"", b"\x01", b"\xff\x00", b"\x01" + b"\xc1" * 50, m.encode(m.Notice(True, False))):
            raw.channel.send(frame)
            assert isinstance(await raw.receive(), m.Fault)
        request = toy_request("a", [5, 6])
        assert tokens_of(await collect(client, request)) == MODEL.generate(request)
        raw.vanish()


async def test_a_client_that_closed_its_socket_loses_its_requests() -> None:
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        raw = RawClient(host.address)
        await raw.greet()
        raw.send(m.Submit(1, toy_request("orphan", [5], max_tokens=ENDLESS)))
        assert isinstance(await raw.receive(), m.Outputs)
        raw.vanish()
        await until_idle(client)
        assert (await client.stats()).num_finished["abort"] == 1


async def test_a_killed_client_process_loses_also_its_waiting_requests() -> None:
    """Nothing is ever sent to it, so only the kernel can tell."""
    config = toy_config(max_num_seqs=1)
    async with hosted(config=config, before_step=dawdle) as host, connected(host) as client:
        script = (
            "import asyncio, sys\n"
            "from fastdeploy_sd.engine.ipc.client import EngineClient\n"
            "from tests.doubles.engines import toy_request\n"
            "async def main():\n"
            "    client = EngineClient(sys.argv[1])\n"
            "    await client.connect()\n"
            "    streams = [client.generate(toy_request(f'k{i}', [5], max_tokens=90)) for i in range(3)]\n"
            "    await asyncio.gather(*[anext(s) for s in streams])\n"
            "asyncio.run(main())\n"
        )
        running = client.generate(toy_request("running", [5], max_tokens=ENDLESS))
        await anext(running)
        with subprocess.Popen(
            [sys.executable, "-c", script, host.address],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ) as process:
            await until_stats(client, lambda stats: stats.num_waiting == 3)
            process.kill()
        stats = await until_stats(client, lambda stats: stats.num_waiting == 0)
        assert stats.num_running == 1
        assert stats.num_finished["abort"] == 3
        await running.aclose()


async def test_a_client_that_reads_nothing_stalls_nobody() -> None:
    async with hosted() as host, connected(host) as client:
        raw = RawClient(host.address)
        await raw.greet()
        raw.send(m.Submit(1, toy_request("unread", [5], max_tokens=300)))
        for i in range(20):
            request = toy_request(f"r{i}", [5, i], max_tokens=20)
            assert tokens_of(await collect(client, request)) == MODEL.generate(request)
        await until_idle(client)
        unread: list[int] = []
        while len(unread) < 300:
            message = await raw.receive()
            assert isinstance(message, m.Outputs)
            unread += tokens_of(message.outputs)
        assert unread == MODEL.generate(toy_request("unread", [5], max_tokens=300))
        raw.vanish()


async def test_an_idle_loop_blocks_in_the_kernel() -> None:
    async with hosted() as host, connected(host) as client:
        waits: list[float | None] = []
        wait = host.channel.wait

        def noted(timeout_s: float | None) -> set[int]:
            waits.append(timeout_s)
            return wait(timeout_s)

        host.channel.wait = noted  # type: ignore[method-assign]
        await collect(client, toy_request("a", [5, 6], max_tokens=5))
        await client.stats()
        await until(lambda: waits[-1] is None, "the loop to block without limit")
        mark = len(waits)
        for _ in range(3):
            await client.stats()
        assert set(waits[mark:]) <= {None}
        assert len(waits) < mark + 20  # a wake-up or so per message


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_an_exception_in_a_step_answers_everyone_and_fails_the_loop() -> None:
    def break_down(plan: SchedulerOutput) -> None:
        dawdle(plan)
        if len(plan.request_ids) == 2:
            raise RuntimeError("broken")

    async with hosted(before_step=break_down) as host, connected(host) as client, connected(host) as other:
        tasks = [
            asyncio.create_task(collect(c, toy_request(f"{i}", [5, i], ENDLESS))) for i, c in enumerate([client, other])
        ]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert type(result) is InternalError
        assert await host.ended() == 1
        assert not client.is_alive
        with pytest.raises(Unavailable):
            await collect(other, toy_request("late", [5]))
        with pytest.raises(Unavailable):
            await client.stats()


async def test_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    gate = Gate()
    async with hosted(before_step=gate) as host, connected(host) as client:
        gate.close()
        request = toy_request("a", [5, 6], max_tokens=20)
        running = asyncio.create_task(collect(client, request))
        await gate.wait_entered()
        host.loop.drain()
        host.loop.drain()  # the same wish again changes nothing
        late = asyncio.create_task(collect(client, toy_request("late", [5])))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(Unavailable) as caught:
            await late
        assert caught.value.code == "draining"
        with pytest.raises(Unavailable, match="draining"):
            client.verify_takes_requests()
        assert tokens_of(await running) == MODEL.generate(request)
        await asyncio.wait_for(client.wait_ended(), WAIT_S)
        assert await host.ended() == 0


async def test_a_block_that_was_lost_shows_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async with hosted() as host, connected(host) as client:
        await collect(client, toy_request("r", [5, 6, 7], max_tokens=3))
        host.engine._pool.kv._pool.allocate(1)
        host.loop.drain()
        assert await host.ended() == 1
    assert "the engine's books are wrong" in caplog.text
    assert "references counted, references held) of 1 blocks" in caplog.text


@pytest.mark.parametrize("is_deadline_zero", [True, False])
async def test_what_still_runs_at_the_end_gets_an_error(is_deadline_zero: bool) -> None:
    gate = Gate()
    timeout_s = 0.0 if is_deadline_zero else 1e6
    async with hosted(before_step=gate, shutdown_timeout_s=timeout_s) as host, connected(host) as client:
        gate.close()
        running = asyncio.create_task(collect(client, toy_request("a", [5, 6], max_tokens=100)))
        await gate.wait_entered()
        host.loop.drain()
        if not is_deadline_zero:
            host.loop.end_now()
        gate.open()
        with pytest.raises(Unavailable, match="shut down"):
            await running
        assert await host.ended() == 0


# ---- many ------------------------------------------------------------------------------------------------------------


async def test_200_streams_with_random_aborts_lose_nothing() -> None:
    rng = random.Random(5)
    info = ModelInfo("toy", 97, 4096, (1,), block_size=4, num_blocks=96)
    config = toy_config(max_num_seqs=16, max_num_batched_tokens=64)
    async with hosted(config=config, info=info) as host, connected(host) as client, connected(host) as other:

        async def stream(i: int) -> str:
            leave_after = rng.choice([None, None, 0, 1, 5])
            # Who leaves would have gone on for long: the abort arrives before the end, however fast the engine is.
            max_tokens = rng.randint(1, 24) if leave_after is None else 300
            request = toy_request(f"r{i}", toy_prompt(i % 7, rng.randint(1, 24), 97), max_tokens=max_tokens)
            tokens: list[int] = []
            outputs = (client if i % 2 else other).generate(request)
            async for output in outputs:
                tokens += output.token_ids
                if leave_after is not None and len(tokens) > leave_after and output.finish_reason is None:
                    await outputs.aclose()
                    return "left"
            assert tokens == MODEL.generate(request)
            return "complete"

        ends = await asyncio.gather(*[stream(i) for i in range(200)])
        await until_idle(client)
        stats = await client.stats()
        assert stats.num_requests == 200
        assert sum(stats.num_finished.values()) == 200
        assert 0 < stats.num_finished["abort"] <= ends.count("left")
        assert stats.num_finished["error"] == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


async def test_a_frame_that_nobody_may_send_is_a_fault_and_costs_nobody_else_anything() -> None:
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        request = toy_request("a", [5, 6, 7], max_tokens=300)
        running = asyncio.create_task(collect(client, request))
        await until_stats(client, lambda stats: stats.num_running == 1)
        raw, version = RawClient(host.address), m.encode(m.ClientDisconnect())[:1]
        for pid in (0, 1 << 31, (1 << 63) - 1):
            raw.channel.send(version + msgpack.packb([1, pid]))
            assert isinstance(await raw.receive(), m.Fault)
        await raw.greet()
        limit = m.max_frame_bytes(host.engine.model_info)
        for frame in (bytes(limit + 1), m.encode(m.Abort(tuple(range(limit))))):
            raw.channel.send(frame)
            fault = await raw.receive()
            assert isinstance(fault, m.Fault)
            assert fault.reason.endswith(f"got {len(frame)} bytes")
        raw.vanish()
        assert tokens_of(await running) == MODEL.generate(request)


async def test_a_request_too_long_for_a_frame_is_refused_before_it_is_sent() -> None:
    """Else the engine's answer, a fault, would name no request."""
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        request = toy_request("a", [5, 6, 7], max_tokens=100)
        running = asyncio.create_task(collect(client, request))
        long = np.zeros(m.max_frame_bytes(host.engine.model_info), np.int32)
        with pytest.raises(BadRequest, match="request: expected at most"):
            await collect(client, dataclasses.replace(request, request_id="long", prompt_token_ids=long))
        assert tokens_of(await running) == MODEL.generate(request)


async def test_an_abort_says_why() -> None:
    async with hosted(before_step=dawdle) as host, connected(host) as client:
        running = asyncio.create_task(collect(client, toy_request("a", [5], max_tokens=ENDLESS)))
        await until_stats(client, lambda stats: stats.num_running == 1)
        await client.abort(["a"], FinishReason.STOP)
        assert (await running)[-1].finish_reason is FinishReason.STOP
        stats = await client.stats()
        assert (stats.num_finished["stop"], stats.num_finished["abort"]) == (1, 0)


async def test_what_is_known_of_experts_reaches_the_caller() -> None:
    report = ExpertReport(True, ((5, 6), (7, 8)), (((0, -1), (1, 0)),), (True, False))

    class Experts:
        """The first engine's, of which each order is noted."""

        def __init__(self) -> None:
            self.orders: list[str] = []

        def stats(self) -> ExpertStats:
            return ExpertStats({3: (4, 5)}, {0: 0.5}, 2, 1)

        def report(self, *, clears: bool = False) -> ExpertReport:
            self.orders += ["report and clear" if clears else "report"]
            return report

        def rearrange(self) -> None:
            if self.orders:
                raise BadRequest("they move", code="rearranging")
            self.orders += ["rearrange"]

    async with hosted() as host, connected(host) as client:
        with pytest.raises(BadRequest, match="experts: expected a model whose experts are spread"):
            await client.experts()
        assert (await client.stats()).experts is None
        host.engine.experts = experts = Experts()
        assert await client.experts(rearranges=True) == report
        assert await client.experts(clears=True) == report
        with pytest.raises(BadRequest, match="they move") as told:
            await client.experts(rearranges=True)
        assert told.value.code == "rearranging"
        assert experts.orders == ["rearrange", "report", "report and clear"]
        assert (await client.stats()).experts == experts.stats()
