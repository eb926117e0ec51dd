"""Rank 0's state of another node and of its ranks. Knows no message and no socket between nodes."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

from fastdeploy_sd.distributed.link import RankLink, Relay


class RemoteRank:
    """A rank of another node; see watch.WatchedRank. Only the thread that reads the messages calls `end`.

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
