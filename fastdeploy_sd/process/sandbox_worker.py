"""The child's side of a sandbox: a process that has loaded what workers need, and the workers that it forks.

The process has one thread, so that forking is safe. A worker is ready within milliseconds and shares all that was
loaded. It answers calls (a name and bytes -> bytes) one after another, each under limits. One that passes a limit ends,
which its client sees as the end of the connection. Knows neither what is loaded nor what the calls do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from fastdeploy_sd.process.child import EXIT_FAILED, EXIT_OK, configure_logging, read_start
from fastdeploy_sd.process.heap import settle_heap

logger = logging.getLogger(__name__)

FORK = struct.Struct("<iqi")  # WorkerLimits; with it come the worker's connection and its lifeline
# What the server writes to a lifeline: the process id (with a process descriptor), then how the process ended.
LIFELINE = struct.Struct("<i")
CALL = struct.Struct("<16sQ")  # name, number of bytes that follow
RESULT = struct.Struct("<QB")  # number of bytes that follow; 1 = they are a note, and the result comes later
_STDIN_FD = 0
_PR_SET_PDEATHSIG = 1
_PAGE = resource.getpagesize()

Handle = Callable[[str, bytes], bytes]
"""Runs a call by its name; raises nothing."""
Note = Callable[[str], None]
"""Says what a call is doing, for the case that it ends the worker; "" = nothing of its own."""
Setup = Callable[[bytes, Note], Handle]
"""Makes a worker's handler from what the client says to each worker first."""
Loader = Callable[[str], Setup]
"""Loads, from a configuration, what workers share."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker may take.

    Attributes:
        nice: how much it yields to other processes, 0 to 19.
        memory_bytes: beyond what it shares with its parent.
        cpu_s: of each call; rounded up to whole seconds.
    """

    nice: int
    memory_bytes: int
    cpu_s: int


def main() -> int:
    """Entry point of the process that forks."""
    start = read_start()
    configure_logging(start["name"])
    # Its threads would not survive a fork, and each worker is meant to use one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    module, name = start["loader"].split(":")
    loader: Loader = getattr(importlib.import_module(module), name)
    setup = loader(start["config"])
    settle_heap()  # or the first collection in every worker would copy what they share
    with socket.socket(fileno=int(start["control"])) as control:
        return _ForkServer(control, setup).run()


class _ForkServer:
    """Forks on demand until its parent is gone, and then kills what it forked."""

    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control = control
        self._setup = setup
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # process descriptor -> process id, lifeline
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(_STDIN_FD, select.POLLIN)

    def run(self) -> int:
        try:
            while True:
                for fd, _ in self._poller.poll():
                    if fd in self._workers:
                        self._collect(fd)
                    elif fd == _STDIN_FD or not self._take():
                        return EXIT_OK
        except ConnectionResetError:
            return EXIT_OK  # the parent is gone
        finally:
            for fd in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)

    def _take(self) -> bool:
        """Fork the worker that is asked for; False when the parent is gone."""
        record, fds, _, _ = socket.recv_fds(self._control, FORK.size, 2)
        if not record:
            return False
        connection, lifeline = (socket.socket(fileno=fd) for fd in fds)
        with connection:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _end_with(parent)
                self._become_worker(WorkerLimits(*FORK.unpack(record)), connection, lifeline)
        fd = os.pidfd_open(pid)
        self._workers[fd] = pid, lifeline
        self._poller.register(fd, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):  # its client has left, and the worker will see that too
            socket.send_fds(lifeline, [LIFELINE.pack(pid)], [fd])
        return True

    def _become_worker(self, limits: WorkerLimits, connection: socket.socket, lifeline: socket.socket) -> None:
        """Never returns: what the parent does at its end is not for the worker."""
        status = EXIT_FAILED
        try:
            self._control.close()
            for fd, (_, other) in self._workers.items():
                os.close(fd)
                other.close()
            lifeline.close()
            _run_worker(self._setup, limits, connection)
            status = EXIT_OK
        except (BrokenPipeError, ConnectionResetError):
            pass  # its client has left
        except Exception:
            logger.exception("a worker failed")
        finally:
            os._exit(status)

    def _collect(self, fd: int) -> None:
        self._poller.unregister(fd)
        pid, lifeline = self._workers.pop(fd)
        _, status = os.waitpid(pid, 0)
        os.close(fd)
        with lifeline, contextlib.suppress(BrokenPipeError):
            lifeline.send(LIFELINE.pack(os.waitstatus_to_exitcode(status)))


def _run_worker(setup: Setup, limits: WorkerLimits, connection: socket.socket) -> None:
    """Answer calls until the client closes the connection."""
    os.nice(limits.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_address_space(limits.memory_bytes)
    _silence_libraries()
    with connection, connection.makefile("rb") as incoming:
        first = _read_call(incoming)
        if first is None:
            return

        def send(content: bytes, is_note: bool) -> None:
            connection.sendall(RESULT.pack(len(content), is_note) + content)

        handle = setup(first[1], lambda note: send(note.encode(), is_note=True))
        while (call := _read_call(incoming)) is not None:
            _limit_cpu_time(limits.cpu_s)
            result = handle(*call)
            del call  # it may be large, and the next one too
            send(result, is_note=False)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, or end at once if that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Within the block let this process grow by no more than that, and never beyond the limit it has already.

    Python's allocations then raise MemoryError; a library's may end the process.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    _limit_address_space(num_bytes, before[0])
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _limit_address_space(num_bytes: int, ceiling: int = resource.RLIM_INFINITY) -> None:
    with open("/proc/self/statm", "rb") as statm:
        limit = int(statm.read().split()[0]) * _PAGE + num_bytes
    soft = limit if ceiling == resource.RLIM_INFINITY else min(limit, ceiling)
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _silence_libraries() -> None:
    """Keep standard error for our log lines: a client could make native code fail, and so fill the log."""
    log = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(log)


def _limit_cpu_time(seconds: int) -> None:
    """From now on; beyond it the kernel ends this process with SIGXCPU."""
    limit = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _read_call(incoming: BinaryIO) -> tuple[str, bytes] | None:
    header = incoming.read(CALL.size)
    if len(header) < CALL.size:
        return None
    name, size = CALL.unpack(header)
    payload = incoming.read(size)
    return (name.rstrip(b"\0").decode(), payload) if len(payload) == size else None
