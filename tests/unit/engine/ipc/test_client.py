"""EngineClient against an engine whose side of the conversation is spoken by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.errors import InternalError, Unavailable
from fastdeploy_sd.types import FinishReason, RequestOutput
from fastdeploy_sd.wire.channel import ServerChannel, directory_of, private_address
from tests.doubles.engines import toy_info, toy_request
from tests.unit.engine.ipc.hosts import WAIT_S, collect


class Engine:
    """The other side."""

    def __init__(self, channel: ServerChannel) -> None:
        self._channel = channel
        self._pending: list[tuple[bytes, m.Message]] = []

    async def receive(self) -> tuple[bytes, m.Message]:
        """The next message and whom it is from."""
        while not self._pending:
            await asyncio.to_thread(self._channel.wait, WAIT_S)
            self._pending += [(identity, m.decode(frame)) for identity, frame in self._channel.receive()]
        return self._pending.pop(0)

    def send(self, identity: bytes, message: m.Message) -> None:
        assert self._channel.send(identity, m.encode(message))

    def send_frame(self, identity: bytes, frame: bytes) -> None:
        assert self._channel.send(identity, frame)


@contextmanager
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process to be taken for the engine's."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@asynccontextmanager
async def conversation(pid: int) -> AsyncIterator[tuple[EngineClient, Engine, bytes]]:
    """A client that has been greeted, the engine's side, and the client's identity."""
    with private_address() as address:
        channel = ServerChannel(address)
        engine, client = Engine(channel), EngineClient(address)
        try:
            connecting = asyncio.create_task(client.connect())
            identity, hello = await engine.receive()
            assert hello == m.ClientHello(os.getpid())
            assert not client.is_alive
            engine.send(identity, m.EngineReady(toy_info(), pid))
            await connecting
            yield client, engine, identity
        finally:
            await client.close()
            await client.close()  # harmless
            channel.close(linger_s=0)


async def test_the_address_is_private_and_goes_away() -> None:
    with private_address() as address:
        directory = directory_of(address)
        assert os.stat(directory).st_mode & 0o777 == 0o700
        ServerChannel(address).close(linger_s=0)
    assert not os.path.exists(directory)


async def test_outputs_of_a_request_end_with_its_finish_reason() -> None:
    async with conversation(os.getpid()) as (client, engine, identity):
        assert client.is_alive
        reading = asyncio.create_task(collect(client, toy_request("a", [5])))
        _, submit = await engine.receive()
        assert isinstance(submit, m.Submit)
        first = RequestOutput("a", (1,))
        last = RequestOutput("a", (2,), finish_reason=FinishReason.LENGTH)
        engine.send(identity, m.Outputs((submit.handle, 999), (first, RequestOutput("gone", (9,)))))
        engine.send(identity, m.Outputs((submit.handle,), (last,)))
        assert await reading == [first, last]


async def test_an_error_output_is_raised_as_its_class() -> None:
    async with conversation(os.getpid()) as (client, engine, identity):
        reading = asyncio.create_task(collect(client, toy_request("a", [5])))
        _, submit = await engine.receive()
        assert isinstance(submit, m.Submit)
        failed = RequestOutput("a", (), finish_reason=FinishReason.ERROR, error=("InternalError", "non-finite logits"))
        engine.send(identity, m.Outputs((submit.handle,), (failed,)))
        with pytest.raises(InternalError, match="non-finite logits"):
            await reading


async def test_leaving_early_sends_one_abort_and_leaving_at_the_end_none() -> None:
    async with conversation(os.getpid()) as (client, engine, identity):
        stream = client.generate(toy_request("a", [5]))
        beginning = asyncio.create_task(anext(stream))
        _, submit = await engine.receive()
        assert isinstance(submit, m.Submit)
        engine.send(identity, m.Outputs((submit.handle,), (RequestOutput("a", (1,)),)))
        await beginning
        await stream.aclose()
        assert (await engine.receive())[1] == m.Abort((submit.handle,))

        reading = asyncio.create_task(collect(client, toy_request("a", [5])))
        _, again = await engine.receive()
        assert isinstance(again, m.Submit)
        assert again.handle != submit.handle
        late = RequestOutput("a", (7,), finish_reason=FinishReason.ABORT)
        last = RequestOutput("a", (2,), finish_reason=FinishReason.STOP)
        engine.send(identity, m.Outputs((submit.handle, again.handle), (late, last)))
        assert await reading == [last]
        await client.close()
        assert (await engine.receive())[1] == m.ClientDisconnect()


async def test_the_death_of_the_engines_process_answers_everyone_at_once() -> None:
    with other_process() as process:
        async with conversation(process.pid) as (client, engine, _):
            reading = asyncio.create_task(collect(client, toy_request("a", [5])))
            asking = asyncio.create_task(client.stats())
            await engine.receive()
            process.kill()
            for waiting in (reading, asking):
                with pytest.raises(Unavailable, match="ended"):
                    await asyncio.wait_for(waiting, WAIT_S)
            assert not client.is_alive
            await asyncio.wait_for(client.wait_ended(), WAIT_S)
            with pytest.raises(Unavailable):
                await collect(client, toy_request("b", [5]))
            await client.abort(["a"])  # nothing to abort, nothing to raise


@pytest.mark.parametrize("is_reaped", [False, True])
async def test_connect_ends_when_the_engines_process_does(is_reaped: bool) -> None:
    with private_address() as address, other_process() as process:
        channel = ServerChannel(address)
        engine, client = Engine(channel), EngineClient(address)
        connecting = asyncio.create_task(client.connect())
        identity, _ = await engine.receive()
        if is_reaped:
            process.kill()
            process.wait()
        engine.send(identity, m.EngineReady(toy_info(), process.pid))
        process.kill()
        with contextlib.suppress(Unavailable):
            await asyncio.wait_for(connecting, WAIT_S)
        await client.wait_ended()
        assert not client.is_alive
        await client.close()
        channel.close(linger_s=0)


async def test_a_greeting_that_was_lost_is_repeated() -> None:
    with private_address() as address:
        channel = ServerChannel(address)
        engine, client = Engine(channel), EngineClient(address)
        connecting = asyncio.create_task(client.connect())
        assert (await engine.receive())[1] == m.ClientHello(os.getpid())
        channel.close(linger_s=0)  # the process that has read it ends without an answer
        channel = ServerChannel(address)
        engine = Engine(channel)
        identity, hello = await engine.receive()
        assert hello == m.ClientHello(os.getpid())
        engine.send(identity, m.EngineReady(toy_info(), os.getpid()))
        await asyncio.wait_for(connecting, WAIT_S)
        await client.close()
        channel.close(linger_s=0)


async def test_the_last_message_counts_before_the_process_ends_and_is_answered() -> None:
    async with conversation(os.getpid()) as (client, engine, identity):
        reading = asyncio.create_task(collect(client, toy_request("a", [5])))
        _, submit = await engine.receive()
        assert isinstance(submit, m.Submit)
        last = RequestOutput("a", (2,), finish_reason=FinishReason.STOP)
        engine.send(identity, m.Outputs((submit.handle,), (last,)))
        engine.send(identity, m.EngineDead("over", has_failed=False))
        assert await reading == [last]
        assert (await engine.receive())[1] == m.ClientDisconnect()
        await client.wait_ended()


async def test_an_engines_failure_is_an_internal_error_to_requests_and_the_end_at_once() -> None:
    """After a client has read the error, the server is down."""
    async with conversation(os.getpid()) as (client, engine, identity):
        stream = client.generate(toy_request("a", [5]))
        reading = asyncio.ensure_future(anext(stream))
        assert isinstance((await engine.receive())[1], m.Submit)
        engine.send(identity, m.EngineDead("the engine failed", has_failed=True))
        with pytest.raises(InternalError, match="the engine failed"):
            await reading
        assert not client.is_alive


@pytest.mark.parametrize("frame", [b"\x01\xc1", m.encode(m.ClientHello(1)), m.encode(m.Fault("no"))])
async def test_a_broken_conversation_ends_what_waits_and_aborts_it(frame: bytes) -> None:
    async with conversation(os.getpid()) as (client, engine, identity):
        reading = asyncio.create_task(collect(client, toy_request("a", [5])))
        asking = asyncio.create_task(client.stats())
        received = [(await engine.receive())[1] for _ in range(2)]
        handles = [message.handle for message in received if isinstance(message, m.Submit)]
        engine.send_frame(identity, frame)
        for waiting in (reading, asking):
            with pytest.raises(InternalError):
                await waiting
        assert (await engine.receive())[1] == m.Abort(tuple(handles))
        assert client.is_alive


async def test_using_a_client_that_is_not_connected() -> None:
    client = EngineClient("ipc:///nowhere")
    with pytest.raises(Unavailable):
        _ = client.model_info
    with pytest.raises(Unavailable):
        await client.stats()
    assert not client.is_alive
    await client.close()
