"""Forked workers: calls, limits, and every way in which a worker, its client or the sandbox's process may end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fastdeploy_sd.process.sandbox import Sandbox, SandboxEndedError, Worker, WorkerEndedError
from fastdeploy_sd.process.sandbox_worker import WorkerLimits

pytestmark = pytest.mark.slow

LIMITS = WorkerLimits(nice=3, memory_bytes=64 << 20, cpu_s=1)
DEADLINE_S = 120.0


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox("tests.unit.process.sandbox_tasks:load", "test", "loaded")
    yield sandbox
    sandbox.close()


@contextlib.contextmanager
def forked(sandbox: Sandbox, limits: WorkerLimits = LIMITS) -> Iterator[Worker]:
    worker = sandbox.fork(limits, b"set up")
    try:
        yield worker
    finally:
        worker.close()


@contextlib.contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(function)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended and was collected by its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_asleep(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rpartition(")")[2].split()[0] in "ST"


def test_a_worker_has_what_was_loaded_and_what_it_is_told(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker:
        assert worker.call("said", b"") == b"loaded set up True"
        assert worker.call("nice", b"") == str(min(os.nice(0) + LIMITS.nice, 19)).encode()
        assert worker.call("pid", b"") == str(worker.pid).encode()


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 5 << 20])
def test_calls_of_any_size_one_after_another(sandbox: Sandbox, size: int) -> None:
    with forked(sandbox) as worker:
        for byte in (b"a", b"b"):
            assert worker.call("echo", byte * size) == byte * size


def test_a_call_may_take_memory_within_the_limit_and_none_beyond(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker:
        assert worker.call("hold", b"1000000")
        with pytest.raises(WorkerEndedError):
            worker.call("hold", str(1 << 30).encode())


def test_a_call_that_computes_for_too_long_ends_its_worker_and_no_other(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker, forked(sandbox) as other:
        assert worker.call("echo", b"noted") == b"noted"
        with pytest.raises(WorkerEndedError) as caught:
            worker.call("spin", b"noted")
        assert (caught.value.status, caught.value.note) == (-signal.SIGXCPU, "at spin")
        assert other.call("echo", b"x") == b"x"


def test_a_call_that_is_stuck_counts_as_one_that_computes_for_too_long(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker:
        with pytest.raises(WorkerEndedError) as caught:
            worker.call("sleep", b"noted")
        assert (caught.value.status, caught.value.note) == (-signal.SIGXCPU, "at sleep")


def test_a_worker_can_be_killed_in_the_middle_of_a_call(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker:
        assert worker.call("echo", b"") == b""
        with in_thread(lambda: worker.call("sleep", b"")) as call:
            wait_until(lambda: is_asleep(worker.pid))
            worker.kill()
            error = call.exception(DEADLINE_S)
        assert isinstance(error, WorkerEndedError)
        assert error.status == -signal.SIGKILL
        wait_until(lambda: is_gone(worker.pid))
    worker.kill()  # closed: nothing happens
    worker.close()


def test_an_idle_worker_that_was_killed_says_so_when_it_is_called(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker:
        worker.call("echo", b"")
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerEndedError) as caught:
            worker.call("echo", b"x" * (5 << 20))
        assert caught.value.status == -signal.SIGKILL


def test_closing_ends_the_calls_and_the_workers(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker, in_thread(lambda: worker.call("sleep", b"")) as call:
        sandbox.close()
        assert isinstance(call.exception(DEADLINE_S), WorkerEndedError)
        wait_until(lambda: is_gone(worker.pid))
        with pytest.raises(SandboxEndedError):
            sandbox.fork(LIMITS)
        assert sandbox.pid is None


def test_a_worker_that_ends_while_it_is_sent_a_call_ends_the_call(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker:
        worker.call("echo", b"")
        os.kill(worker.pid, signal.SIGSTOP)
        with in_thread(lambda: worker.call("echo", b"x" * (5 << 20))) as call:
            time.sleep(0.05)  # it fills the socket
            sandbox.close()
            assert isinstance(call.exception(DEADLINE_S), WorkerEndedError)


def test_a_process_that_is_killed_takes_its_workers_with_it_and_is_replaced(sandbox: Sandbox) -> None:
    with forked(sandbox) as worker, in_thread(lambda: worker.call("sleep", b"")) as call:
        pid = sandbox.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert isinstance(call.exception(DEADLINE_S), WorkerEndedError)
        wait_until(lambda: is_gone(worker.pid))
        with forked(sandbox) as other:
            assert other.call("echo", b"x") == b"x"
        assert sandbox.pid not in (None, pid)


def test_who_asks_while_the_process_ends_gets_a_worker_of_the_next_one(sandbox: Sandbox) -> None:
    sandbox.start()
    pid, forking = sandbox.pid, threading.Event()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def fork() -> bytes:
        forking.set()
        with forked(sandbox) as worker:
            return worker.call("echo", b"x")

    with in_thread(fork) as call:
        assert forking.wait(DEADLINE_S)
        time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        assert call.result(DEADLINE_S) == b"x"


def test_a_process_that_cannot_load_is_an_error() -> None:
    sandbox = Sandbox("tests.unit.process.sandbox_tasks:missing", "test", "")
    with pytest.raises(SandboxEndedError):
        sandbox.fork(LIMITS)
    sandbox.close()
