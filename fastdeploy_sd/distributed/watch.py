"""Detects ranks that end or hang, on any host.

Silence does not show that a rank hangs: a step over a long prompt may take minutes. But then some rank computes. When
none computes although answers are awaited, the ranks wait for one that is stopped or deadlocked.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fastdeploy_sd.distributed.link import RankLink, Relay
from fastdeploy_sd.process.child import ChildProcess, describe_exit
from fastdeploy_sd.process.liveness import CpuClock, WorkClock, is_stopped

_PROBES_PER_TIMEOUT = 8
_LONGEST_PAUSE_S = 1.0
# Ranks that work spend at least this share of the time between probes on a processor; polling takes far less.
_WORKING_SHARE = 0.01
# So many timeouts pass before a rank that computes but does not answer counts as hung, where rank 0 only waits for it.
COMPUTING_TIMEOUTS = 10


class WatchedRank(Protocol):
    """A rank's process, as seen from rank 0's."""

    def open_end(self) -> int | None:
        """Return a descriptor that becomes readable at its end, and that the caller closes; None = it has ended."""
        ...

    def describe_end(self) -> str:
        """Return how it ended, once it has: "ended (exit status 1)"."""
        ...

    def cpu_s(self) -> float:
        """Return its processor time so far, in seconds."""
        ...

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        ...

    def kill(self) -> None: ...


class LocalRank:
    """A child of this process; see WatchedRank."""

    def __init__(self, child: ChildProcess) -> None:
        self.child = child
        self._clock = CpuClock(child.pid)

    def open_end(self) -> int | None:
        try:
            return os.pidfd_open(self.child.pid) if self.child.is_running else None
        except ProcessLookupError:  # it was reaped
            return None

    def describe_end(self) -> str:
        status = self.child.status
        return f"ended ({describe_exit(status) if status is not None else 'unknown'})"

    def cpu_s(self) -> float:
        return self._clock.read()

    def is_stopped(self) -> bool:
        return is_stopped(self.child.pid)

    def kill(self) -> None:
        self.child.signal(signal.SIGKILL)


class RemoteRank:
    """A rank of another node; see WatchedRank. Only the thread that reads the messages calls `end`.

    Attributes:
        link: rank 0's end. relay: the other one, the thread's. is_open: whether its bytes are carried.
    """

    def __init__(self, rank: int, node: RemoteNode) -> None:
        self.rank, self._node = rank, node
        self.link, theirs = RankLink.pair()
        self.relay, self.is_open = Relay(theirs), True
        self._how: str | None = None
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)

    def open_end(self) -> int | None:
        return os.dup(self._ended)

    def describe_end(self) -> str:
        return self._how or "ended"

    def cpu_s(self) -> float:
        return self._node.cpu_s / len(self._node.ranks)

    def is_stopped(self) -> bool:
        return self.rank in self._node.stopped

    def kill(self) -> None:
        self._node.to_kill.append(self.rank)

    def end(self, how: str) -> None:
        """Note that it has ended; only the first call counts."""
        if self._how is None:
            self._how = how
            os.eventfd_write(self._ended, 1)

    def close(self) -> None:
        """Free the descriptors; the thread has ended."""
        self.relay.close()
        self.link.close()
        os.close(self._ended)


@dataclass(eq=False)
class RemoteNode:
    """Another node, as far as it is known. name: for people."""

    name: str
    identity: bytes | None = None
    silent_s: float = 0.0
    cpu_s: float = 0.0
    stopped: tuple[int, ...] = ()
    is_lost: bool = False
    ranks: dict[int, RemoteRank] = field(default_factory=dict)
    waiting: deque[bytes] = field(default_factory=deque)  # frames for which there was no room
    to_kill: deque[int] = field(default_factory=deque)


class RankWatch:
    """Watches from a thread of its own, until `close`.

    Args:
        timeout_s: the longest time without computation of any rank while answers are awaited.
        on_end: called once, in that thread, when the first rank has ended, with how it ended.
        waits_elsewhere: whether they may wait for others than these ranks; then none of them hangs.

    Attributes:
        fd: readable from the first rank's end on.
    """

    def __init__(
        self,
        ranks: Mapping[int, WatchedRank],
        timeout_s: float,
        on_end: Callable[[str], None],
        waits_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks, self._timeout_s, self._on_end = ranks, timeout_s, on_end
        self._waits_elsewhere = waits_elsewhere
        self._pause_s = probe_pause_s(timeout_s)
        own_clock = CpuClock(os.getpid())
        self._clock = WorkClock(
            lambda: own_clock.read() + sum(process.cpu_s() for process in ranks.values()),
            _WORKING_SHARE,
            self._pause_s,
        )
        self._awaited: frozenset[int] = frozenset()
        self._is_idle_otherwise = False
        self._silent_s = self._waited_s = 0.0
        self._hung: dict[int, str] = {}
        self._failure: str | None = None
        self._has_failed = threading.Event()
        self.fd, self._failure_write = os.pipe()
        self._close_read, self._close_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def expect(self, ranks: frozenset[int], *, is_idle_otherwise: bool) -> None:
        """Set the ranks whose answers are awaited from now on, and whether this process only waits."""
        self._awaited, self._is_idle_otherwise = ranks, is_idle_otherwise

    def failure(self, timeout_s: float) -> str | None:
        """Return how the first rank ended, waiting at most `timeout_s` for it; None = all are running."""
        self._has_failed.wait(timeout_s)
        return self._failure

    def close(self) -> None:
        os.close(self._close_write)
        self._thread.join()
        for fd in (self._close_read, self.fd, self._failure_write):
            os.close(fd)

    def _watch(self) -> None:
        with contextlib.ExitStack() as opened:
            poll, rank_of = select.poll(), dict[int, int]()
            for rank, process in self._ranks.items():
                fd = process.open_end()
                if fd is None:
                    self._note_end(rank)
                    continue
                opened.callback(os.close, fd)
                rank_of[fd] = rank
                poll.register(fd, select.POLLIN)
            poll.register(self._close_read, select.POLLIN)
            while True:
                ready = [fd for fd, _ in poll.poll(self._pause_s * 1e3)]
                if self._close_read in ready:
                    return
                for fd in ready:
                    poll.unregister(fd)
                    self._note_end(rank_of[fd])
                self._probe()

    def _probe(self) -> None:
        elapsed_s, has_computed = self._clock.probe()
        awaited = self._awaited
        self._silent_s = self._silent_s + elapsed_s if awaited and not has_computed else 0.0
        self._waited_s = self._waited_s + elapsed_s if awaited and self._is_idle_otherwise else 0.0
        if awaited and self._waits_elsewhere():
            self._silent_s = self._waited_s = 0.0
        if self._silent_s > self._timeout_s:
            self._kill(frozenset(r for r in awaited if self._ranks[r].is_stopped()) or awaited, self._silent_s)
        elif self._waited_s > COMPUTING_TIMEOUTS * self._timeout_s:
            self._kill(awaited, self._waited_s)

    def _kill(self, ranks: frozenset[int], seconds: float) -> None:
        self._silent_s = self._waited_s = 0.0
        for rank in ranks:
            self._hung[rank] = f"has got nowhere for {seconds:.0f} s"
            self._ranks[rank].kill()

    def _note_end(self, rank: int) -> None:
        reason = self._hung.get(rank) or self._ranks[rank].describe_end()
        if self._failure is None:
            self._failure = f"rank {rank} {reason}"
            self._has_failed.set()
            os.write(self._failure_write, b"\0")
            self._on_end(self._failure)


def probe_pause_s(timeout_s: float) -> float:
    """Return the pause between probes for heartbeats with this timeout."""
    return min(_LONGEST_PAUSE_S, timeout_s / _PROBES_PER_TIMEOUT)
