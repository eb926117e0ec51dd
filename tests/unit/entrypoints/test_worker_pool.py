"""Processes that die are replaced, unless they die of their start; a process ends although its threads do not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastdeploy_sd.entrypoints import worker_pool
from fastdeploy_sd.entrypoints.worker_pool import WorkerPool
from fastdeploy_sd.process.child import ChildProcess, end_with_parent, read_start

pytestmark = pytest.mark.slow

WAIT_S = 120.0
MODULE = "tests.unit.entrypoints.test_worker_pool"


def die() -> int:
    """Ends at once, badly."""
    return 7


def wait_for_word() -> int:
    """Ends well when its parent says anything."""
    folder = Path(read_start()["folder"])
    end_with_parent(heard=lambda: os._exit(0))
    (folder / str(os.getpid())).touch()
    time.sleep(1000)
    return 1


async def test_who_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker_pool, "_FIRST_PAUSE_S", 0.01)
    num_given_up = 0

    def give_up() -> None:
        nonlocal num_given_up
        num_given_up += 1

    pool = WorkerPool(lambda number: ChildProcess(f"{MODULE}:die", {}), 1, give_up)
    assert await asyncio.wait_for(pool.run(), WAIT_S) == 1
    assert num_given_up == 1
    deaths = [r for r in caplog.records if "failed (exit status 7)" in r.getMessage()]
    assert len(deaths) == 6


async def _wait_for_files(folder: Path, count: int) -> set[int]:
    async with asyncio.timeout(WAIT_S):
        while len(pids := {int(p.name) for p in folder.iterdir()}) < count:
            await asyncio.sleep(0.01)
    return pids


async def test_one_that_dies_is_replaced_and_the_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_pool, "_FIRST_PAUSE_S", 0.01)
    start = {"folder": str(tmp_path)}
    pool = WorkerPool(lambda number: ChildProcess(f"{MODULE}:wait_for_word", start), 2, give_up=lambda: None)
    running = asyncio.create_task(pool.run())
    doomed, other = await _wait_for_files(tmp_path, 2)
    os.kill(doomed, signal.SIGKILL)
    assert other in await _wait_for_files(tmp_path, 3)
    os.kill(other, 0)
    pool.begin_drain()
    assert await asyncio.wait_for(running, WAIT_S) == 0


async def test_who_ends_of_a_signal_of_the_pool_has_not_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = {"folder": str(tmp_path)}
    pool = WorkerPool(lambda number: ChildProcess(f"{MODULE}:wait_for_word", start), 1, give_up=lambda: None)
    running = asyncio.create_task(pool.run())
    await _wait_for_files(tmp_path, 1)
    pool._drain.set()
    pool.signal(signal.SIGTERM)
    await asyncio.wait_for(running, WAIT_S)
    assert not caplog.records


async def test_a_drain_ends_the_pause_before_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended before would have been replaced, and is no failure."""
    monkeypatch.setattr(worker_pool, "_FIRST_PAUSE_S", 2 * WAIT_S)
    start = {"folder": str(tmp_path)}
    pool = WorkerPool(lambda number: ChildProcess(f"{MODULE}:wait_for_word", start), 1, give_up=lambda: None)
    running = asyncio.create_task(pool.run())
    (only,) = await _wait_for_files(tmp_path, 1)
    os.kill(only, signal.SIGKILL)
    while Path(f"/proc/{only}").exists():
        await asyncio.sleep(0.01)
    pool.begin_drain()
    assert await asyncio.wait_for(running, WAIT_S) == 0


async def test_none_is_replaced_during_a_drain(tmp_path: Path) -> None:
    start = {"folder": str(tmp_path)}
    pool = WorkerPool(lambda number: ChildProcess(f"{MODULE}:wait_for_word", start), 1, give_up=lambda: None)
    running = asyncio.create_task(pool.run())
    (only,) = await _wait_for_files(tmp_path, 1)
    os.kill(only, signal.SIGSTOP)
    os.waitid(os.P_PID, only, os.WSTOPPED | os.WNOWAIT)  # or it might still hear the drain, and end well
    pool.begin_drain()
    os.kill(only, signal.SIGKILL)
    assert await asyncio.wait_for(running, WAIT_S) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_ends_although_a_thread_of_it_goes_on() -> None:
    code = (
        "import asyncio, time\n"
        "from fastdeploy_sd.process.child import leave_within\n"
        "async def main():\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)\n"
        "    leave_within(0.5, 3)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=False)
    assert done.returncode == 3
