"""Groups of ranks for tests: threads of this process, or processes of their own that take orders."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fastdeploy_sd.device.communicator import SEGMENT_BYTES, Communicator, shared_segment

T = TypeVar("T")
# Until what must happen has happened; nothing here measures how fast it is.
TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def shared_group(
    size: int, num_bytes: int = SEGMENT_BYTES, timeout_s: float = TIMEOUT_S
) -> Iterator[list[Communicator]]:
    """Give the ends of one group, all in this process."""
    fd = shared_segment(num_bytes)
    ends: list[Communicator] = []
    try:
        ends += [Communicator.shared(fd, rank, size, timeout_s) for rank in range(size)]
        yield ends
    except BaseException:
        for end in ends:  # not closed: a rank may still wait
            end.abort()
        raise
    else:
        for end in ends:
            end.close()
    finally:
        os.close(fd)


def on_threads(size: int, body: Callable[[int], T]) -> list[T | Exception]:
    """Run the body for every rank at once; return what each returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


class RankProcess:
    """A rank in a process of its own; see rank_process.py, or gpu_rank_process.py."""

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float, module: str = "rank_process") -> None:
        command = [sys.executable, "-m", f"tests.ops.{module}", *map(str, (fd, rank, size, timeout_s))]
        self.process = subprocess.Popen(command, pass_fds=[fd], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._buffer = b""

    def send(self, order: str, **arguments: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"order": order, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self) -> Any:
        """Wait for the answer to the oldest order that has none yet."""
        assert self.process.stdout is not None
        end = time.monotonic() + TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                assert selector.select(max(end - time.monotonic(), 0)), "a rank does not answer"
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, "a rank has ended"
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, order: str, **arguments: Any) -> Any:
        """Give an order and wait for the answer."""
        self.send(order, **arguments)
        return self.reply()

    def ask_in_time(self, order: str, **arguments: Any) -> Any:
        """As `ask`, and again while ranks that run are late, as they may be on a busy machine."""
        end = time.monotonic() + TIMEOUT_S
        while str(answer := self.ask(order, **arguments)).endswith(" in time"):
            assert time.monotonic() < end, answer
        return answer

    def end(self) -> None:
        """Kill the process, in whatever state it is."""
        self.process.kill()
        with self.process:
            pass


@contextlib.contextmanager
def rank_processes(
    size: int, timeout_s: float = TIMEOUT_S, module: str = "rank_process"
) -> Iterator[list[RankProcess]]:
    """Give the ranks of one group, each a process; what they first say, all of them are told."""
    fd = shared_segment()
    ranks: list[RankProcess] = []
    try:
        ranks += [RankProcess(fd, rank, size, timeout_s, module) for rank in range(size)]
        said = [rank.reply() for rank in ranks]
        for rank in ranks:
            assert rank.ask("meet", said=said) == "ready"
        yield ranks
    finally:
        os.close(fd)
        for rank in ranks:
            rank.end()
