"""Forked workers: calls, limits, and every way in which a worker, its client or the fork server may end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from fastdeploy_sd.process.fork_worker import WorkerLimits
from fastdeploy_sd.process.forked import ForkServer, ForkServerEndedError, Worker, WorkerEndedError

pytestmark = pytest.mark.slow

LIMITS = WorkerLimits(nice=3, memory_bytes=64 << 20, cpu_s=1)
DEADLINE_S = 120.0


@contextlib.asynccontextmanager
async def forking() -> AsyncIterator[ForkServer]:
    server = ForkServer("tests.unit.process.fork_tasks:load", {"name": "test", "config": "loaded"})
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server
    finally:
        server.close()


async def started(server: ForkServer) -> Worker:
    worker = await server.fork(LIMITS)
    await worker.tell("setup", b"set up")
    return worker


async def ended(pid: int) -> None:
    """Wait until a process is gone, collected by its parent too."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} lives")


async def test_a_worker_has_what_was_loaded_and_what_it_is_told() -> None:
    async with forking() as server:
        worker = await started(server)
        assert await worker.call("said", b"") == b"loaded set up True"
        assert await worker.call("nice", b"") == str(min(os.nice(0) + LIMITS.nice, 19)).encode()
        assert await worker.call("pid", b"") == str(worker.pid).encode()


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 5 << 20])
async def test_calls_of_any_size_one_after_another(size: int) -> None:
    async with forking() as server:
        worker = await started(server)
        for byte in (b"a", b"b"):
            assert await worker.call("echo", byte * size) == byte * size


async def test_a_call_may_take_memory_within_the_limit_and_none_beyond() -> None:
    async with forking() as server:
        worker = await started(server)
        assert await worker.call("hold", b"1000000")
        with pytest.raises(WorkerEndedError):
            await worker.call("hold", str(1 << 30).encode())


async def test_a_call_that_computes_for_too_long_ends_its_worker_and_no_other() -> None:
    async with forking() as server:
        worker, other = await started(server), await started(server)
        assert await worker.call("echo", b"noted") == b"noted"
        with pytest.raises(WorkerEndedError) as caught:
            await worker.call("spin", b"noted")
        assert (caught.value.status, caught.value.note) == (-signal.SIGXCPU, "at spin")
        assert not worker.is_running
        assert await other.call("echo", b"x") == b"x"


async def test_a_worker_whose_call_is_cancelled_is_killed_in_the_middle_of_it() -> None:
    async with forking() as server:
        worker = await started(server)
        call = asyncio.create_task(worker.call("sleep", b""))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        worker.close()
        await ended(worker.pid)


async def test_an_idle_worker_that_is_killed_is_known_to_be_gone() -> None:
    async with forking() as server:
        worker = await started(server)
        await worker.call("echo", b"")
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerEndedError) as caught:
            await worker.call("echo", b"")
        assert caught.value.status == -signal.SIGKILL


async def test_closing_the_server_ends_the_calls_and_the_workers() -> None:
    async with forking() as server:
        worker = await started(server)
        call = asyncio.create_task(worker.call("sleep", b""))
        await asyncio.sleep(0.05)
        server.close()
        with pytest.raises(WorkerEndedError):
            await call
        await ended(worker.pid)
        with pytest.raises(ForkServerEndedError):
            await server.fork(LIMITS)


async def test_a_worker_that_ends_while_it_is_sent_a_call_is_sent_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async with forking() as server:
        worker = await started(server)
        await worker.call("echo", b"")
        os.kill(worker.pid, signal.SIGSTOP)
        call = asyncio.create_task(worker.call("echo", b"x" * (5 << 20)))
        await asyncio.sleep(0.05)
        server.close()
        with pytest.raises(WorkerEndedError):
            await call
    assert not caplog.records


async def test_workers_do_not_outlive_a_fork_server_that_is_killed() -> None:
    async with forking() as server:
        worker = await started(server)
        call = asyncio.create_task(worker.call("sleep", b""))
        await asyncio.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(WorkerEndedError):
            await call
        await ended(worker.pid)
        assert server.is_closed


async def test_who_asks_while_the_server_ends_is_told() -> None:
    async with forking() as server:
        await started(server)
        os.kill(server.pid, signal.SIGSTOP)
        asking = asyncio.create_task(server.fork(LIMITS))
        await asyncio.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ForkServerEndedError):
            await asking
