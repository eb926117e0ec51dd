"""The engine as a real process: ready, exit status, and ending together with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.engine.ipc.engine_process import start_engine
from fastdeploy_sd.errors import InternalError, Unavailable
from fastdeploy_sd.process.child import ChildProcess, describe_exit
from fastdeploy_sd.wire.channel import directory_of, private_address
from tests.doubles.engines import toy_config, toy_request
from tests.doubles.toy_model import ToyModel
from tests.unit.engine.ipc import hosts
from tests.unit.engine.ipc.hosts import WAIT_S, collect, tokens_of

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def engine_process(factory: Callable[..., object]) -> AsyncIterator[tuple[ChildProcess, EngineClient]]:
    """A started engine process and a client that has not connected yet."""
    with private_address() as address:
        executor = f"{factory.__module__}:{factory.__name__}"
        with contextlib.closing(start_engine(toy_config(), address, executor)) as engine:
            client = EngineClient(address)
            try:
                yield engine, client
            finally:
                await client.close()


async def _begin(client: EngineClient, name: str) -> asyncio.Task[list[int]]:
    """Start reading an endless request; return once it has a token."""
    first = asyncio.Event()

    async def read() -> list[int]:
        tokens: list[int] = []
        async for output in client.generate(toy_request(name, [5, 6], max_tokens=4000)):
            tokens += output.token_ids
            first.set()
        return tokens

    task = asyncio.create_task(read())
    await asyncio.wait_for(first.wait(), WAIT_S)
    return task


async def test_sigterm_lets_requests_finish_and_exits_with_0() -> None:
    async with engine_process(hosts.create_slow_toy) as (engine, client):
        await asyncio.wait_for(client.connect(), WAIT_S)
        request = toy_request("a", [5, 6], max_tokens=200)
        stream = client.generate(request)
        outputs = [await anext(stream)]
        engine.signal(signal.SIGTERM)
        engine.signal(signal.SIGTERM)
        outputs += [output async for output in stream]
        assert tokens_of(outputs) == ToyModel(97).generate(request)
        assert await asyncio.wait_for(engine.wait(), WAIT_S) == 0


async def test_sigint_ends_requests_with_an_error_and_exits_with_0() -> None:
    async with engine_process(hosts.create_slow_toy) as (engine, client):
        await asyncio.wait_for(client.connect(), WAIT_S)
        reading = await _begin(client, "a")
        engine.signal(signal.SIGTERM)
        engine.signal(signal.SIGINT)
        with pytest.raises(Unavailable, match="shut down"):
            await asyncio.wait_for(reading, WAIT_S)
        assert await asyncio.wait_for(engine.wait(), WAIT_S) == 0


async def test_a_killed_engine_answers_pending_requests_through_the_kernel() -> None:
    async with engine_process(hosts.create_slow_toy) as (engine, client):
        await asyncio.wait_for(client.connect(), WAIT_S)
        reading = [await _begin(client, f"r{i}") for i in range(3)]
        engine.signal(signal.SIGKILL)
        for task in reading:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(task, WAIT_S)
        assert not client.is_alive
        assert describe_exit(await engine.wait()) == "killed by SIGKILL"


async def test_a_broken_step_answers_pending_requests_and_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine_process(hosts.create_toy) as (engine, client):
        await asyncio.wait_for(client.connect(), WAIT_S)
        with pytest.raises(InternalError, match="the engine failed"):
            await asyncio.wait_for(collect(client, toy_request("crash", [5])), WAIT_S)
        assert await asyncio.wait_for(engine.wait(), WAIT_S) == 1
    assert "RuntimeError: the toy broke" in capfd.readouterr().err


async def test_a_wrong_checkpoint_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine_process(hosts.create_misconfigured) as (engine, _):
        assert await engine.wait() == 2
    assert capfd.readouterr().err == "error: model: expected a checkpoint with weights, got none\n"


async def test_a_failure_to_load_is_logged_and_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine_process(hosts.create_broken) as (engine, _):
        assert await engine.wait() == 1
    assert "RuntimeError: the toy cannot be loaded" in capfd.readouterr().err


def test_the_engine_ends_with_its_parent() -> None:
    """A parent that is killed cannot clean up; the engine does, also while it is busy."""
    script = (
        "import asyncio, os, sys\n"
        "from fastdeploy_sd.wire.channel import private_address\n"
        "from fastdeploy_sd.engine.ipc.client import EngineClient\n"
        "from fastdeploy_sd.engine.ipc.engine_process import start_engine\n"
        "from tests.doubles.engines import toy_config, toy_request\n"
        "async def main():\n"
        "    with private_address() as address:\n"
        "        engine = start_engine(toy_config(), address, 'tests.unit.engine.ipc.hosts:create_slow_toy')\n"
        "        client = EngineClient(address)\n"
        "        await client.connect()\n"
        "        await anext(client.generate(toy_request('a', [5], max_tokens=4000)))\n"
        "        print(engine.pid, address, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, address = parent.stdout.readline().split()
        engine_fd = os.pidfd_open(int(pid))
        parent.kill()
    try:
        assert select.select([engine_fd], [], [], WAIT_S)[0], "the engine outlived its parent"
    finally:
        os.close(engine_fd)
    assert not os.path.exists(directory_of(address.decode()))
