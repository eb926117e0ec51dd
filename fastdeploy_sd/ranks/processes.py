"""Rank 0's hold on the other ranks: their processes, what is sent to them, and what they answer."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from fastdeploy_sd.config import Config, to_json
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.ipc.child import ChildProcess
from fastdeploy_sd.ipc.codec import ProtocolError
from fastdeploy_sd.parallel.communicator import Communicator, shared_segment
from fastdeploy_sd.ranks.link import Link, LinkClosedError
from fastdeploy_sd.ranks.messages import (
    Done,
    Failed,
    Loaded,
    Measure,
    Measured,
    Ready,
    Smallest,
    Stop,
    decode,
    encode,
    frame_of,
)
from fastdeploy_sd.ranks.watch import COMPUTING_TIMEOUTS, RankWatch
from fastdeploy_sd.runtime import library
from fastdeploy_sd.worker.commands import Attempt, Command
from fastdeploy_sd.worker.kv_file import create_kv_file
from fastdeploy_sd.worker.lead import GroupEnded

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", Done, Loaded, Measured, Ready)

# From a closed link to the end of its process.
_END_S = 5.0
_STOP_S = 5.0
# A rank that gets nowhere for so long while it loads: it may wait for a slow disk.
LOADING_TIMEOUT_S = 300.0


class RankProcesses:
    """Ranks 1 .. size - 1, running from the constructor to `close`. OtherRanks of rank 0's worker; used by one thread.

    Args:
        follower: "module:function" that makes what a rank computes with, a `process.FollowerFactory`.
        timeout_s: a rank that gets nowhere for longer hangs, and is killed.

    Attributes:
        communicator: rank 0's end of what the ranks exchange.
        kv_files: see RankGroup.
    """

    def __init__(self, config: Config, size: int, follower: str, timeout_s: float) -> None:
        self._links: dict[int, Link] = {}
        self._children: dict[int, ChildProcess] = {}
        self._timeout_s = timeout_s
        self._posted: list[bytes] = []
        self._is_ready = False
        segment = shared_segment()
        # Ranks that hang are noticed by the watch, which knows them from slow ones.
        patience_s = COMPUTING_TIMEOUTS * timeout_s
        self.communicator = Communicator.shared(segment, 0, size, patience_s)
        self.kv_files = {rank: create_kv_file() for rank in range(1, size)} if config.copies_kv else {}
        for rank in range(1, size):
            link, theirs = Link.pair()
            with theirs:
                start = {
                    "config": to_json(config),
                    "follower": follower,
                    "rank": str(rank),
                    "size": str(size),
                    "num_threads": str(threads_per_rank(size)),
                    "segment": str(segment),
                    "patience_s": str(patience_s),
                    "isa": library.isa(),
                    "link": str(theirs.fileno()),
                }
                fds = [theirs.fileno(), segment]
                if rank in self.kv_files:
                    start["kv_file"] = str(self.kv_files[rank])
                    fds.append(self.kv_files[rank])
                self._children[rank] = ChildProcess(
                    "fastdeploy_sd.ranks.process:main", start, tuple(fds), ignores_signals=True
                )
            self._links[rank] = link
        os.close(segment)
        self._all = frozenset(self._links)
        self._watch = RankWatch(self._children, LOADING_TIMEOUT_S, self._end)

    @property
    def failure_fd(self) -> int:
        """Readable from the first rank's end on."""
        return self._watch.fd

    # ---- while the model loads --------------------------------------------------------------------------------------

    def smallest(self, measure: Callable[[], int]) -> int:
        """See RankGroup.smallest."""
        self._receive_all(Loaded)
        self._send_all(frame_of([encode(Measure())]))
        own = measure()
        value = min(own, *(reply.value for reply in self._receive_all(Measured).values()))
        self._send_all(frame_of([encode(Smallest(value))]))
        return value

    def wait_ready(self) -> None:
        """Wait until all have loaded; from now on they must answer in time.

        Raises:
            GroupEnded: a rank could not load.
        """
        self._receive_all(Ready)
        self._is_ready = True
        self._watch.close()
        self._watch = RankWatch(self._children, self._timeout_s, self._end)

    # ---- steps; see OtherRanks --------------------------------------------------------------------------------------

    def post(self, command: Command) -> None:
        self._posted.append(encode(command))

    def send(self, attempt: Attempt) -> None:
        frame = frame_of([*self._posted, encode(attempt)])
        self._posted.clear()
        self._watch.expect(self._all, is_idle_otherwise=False)
        self._send_all(frame)

    def collect(self) -> Mapping[int, str]:
        return {rank: done.failure for rank, done in self._receive_all(Done).items() if done.failure}

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Have the ranks end, with force if need be. Nothing of them is left."""
        self._watch.close()
        frame = frame_of([*self._posted, encode(Stop())])
        for link in self._links.values():
            with contextlib.suppress(LinkClosedError):
                link.send(frame)
        deadline = time.monotonic() + _STOP_S
        for rank, child in self._children.items():
            if not _has_ended(child, deadline - time.monotonic()):
                logger.warning("rank %d does not end and is killed", rank)
            child.close()
        self._free()

    def kill(self) -> None:
        """Have the ranks end at once."""
        for child in self._children.values():
            child.close()
        self._watch.close()
        self._free()

    def _free(self) -> None:
        for link in self._links.values():
            link.close()
        for fd in self.kv_files.values():
            os.close(fd)
        self.communicator.close()

    def _end(self, reason: str) -> None:
        """A rank has ended, so that none of the others, nor this one, must wait for anything any more."""
        if self._is_ready:  # why the model cannot be loaded is told once, by whoever wants it loaded
            logger.error("%s", reason)
        self.communicator.abort()
        for link in self._links.values():
            link.shut()

    def _send_all(self, frame: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(frame)
            except LinkClosedError:
                raise self._ended(rank) from None

    def _receive_all(self, kind: type[ReplyT]) -> dict[int, ReplyT]:
        """Return one reply of each rank.

        Raises:
            GroupEnded: a rank has ended, or answered something else.
        """
        awaited, replies = self._all, dict[int, ReplyT]()
        for rank, link in self._links.items():
            self._watch.expect(awaited, is_idle_otherwise=True)
            try:
                frame = link.receive()
            except LinkClosedError:
                raise self._ended(rank) from None
            replies[rank] = self._read(rank, frame, kind)
            awaited -= {rank}
        self._watch.expect(frozenset(), is_idle_otherwise=False)
        return replies

    def _read(self, rank: int, frame: bytes, kind: type[ReplyT]) -> ReplyT:
        try:
            [reply] = decode(frame)
        except (ProtocolError, ValueError) as error:
            raise GroupEnded(InternalError(f"rank {rank}: unreadable answer: {error}")) from None
        if isinstance(reply, Failed):
            raise GroupEnded(reply.error.to_exception())
        if not isinstance(reply, kind):
            name = type(reply).__name__
            raise GroupEnded(InternalError(f"rank {rank}: expected {kind.__name__}, got {name}"))
        return reply

    def _ended(self, rank: int) -> GroupEnded:
        """What to say of a closed link: the reason that some rank gave before it ended, else how the first one did."""
        failure = self._watch.failure(_END_S)
        for link in self._links.values():
            while (frame := link.leftover()) is not None:
                with contextlib.suppress(ProtocolError):
                    for reply in decode(frame):
                        if isinstance(reply, Failed):
                            return GroupEnded(reply.error.to_exception())
        return GroupEnded(InternalError(failure or f"rank {rank} has closed its link"))


def threads_per_rank(size: int) -> int:
    """Return a rank's share of the cores that this process may run on, at least one thread."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def _has_ended(child: ChildProcess, patience_s: float) -> bool:
    if not child.is_running:
        return True
    fd = os.pidfd_open(child.pid)
    try:
        return bool(select.select([fd], [], [], max(0.0, patience_s))[0])
    finally:
        os.close(fd)
