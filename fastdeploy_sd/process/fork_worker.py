"""What a forked worker does: calls, one after another, under limits on memory and on the time each may take.

A call is a name and bytes; its result is bytes. A call that passes a limit ends the worker, which its client sees as
the end of the connection. Knows no event loop and nothing of what the calls do.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

CALL = struct.Struct("<16sQ")  # name, number of bytes that follow
RESULT = struct.Struct("<QB")  # number of bytes that follow; 1 = they are a note, and the result comes later
_PR_SET_PDEATHSIG = 1
_PAGE = resource.getpagesize()

Handle = Callable[[str, bytes], bytes]
"""Runs a call by its name; raises nothing."""
Note = Callable[[str], None]
"""Says what a call is doing, for the case that it ends the worker; "" = nothing of its own."""
Setup = Callable[[bytes, Note], Handle]
"""Makes a worker's handler from what the client says to each worker first."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker may take.

    Attributes:
        nice: how much it stands back for other processes, 0 to 19.
        memory_bytes: beyond what it shares with its parent.
        cpu_s: of each call; rounded up to whole seconds.
    """

    nice: int
    memory_bytes: int
    cpu_s: int


def run_worker(setup: Setup, limits: WorkerLimits, connection: socket.socket) -> None:
    """Answer calls until the client closes the connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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


@contextmanager
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
