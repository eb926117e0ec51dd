"""Ranks that share experts over several "hosts": memory of their own each, and frames that a thread carries."""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_sd.device.expert_mirror import ExpertMirror
from fastdeploy_sd.device.expert_service import ExpertService
from tests.ops.expert_model import Layer, Placement, Ranks

_NAP_S = 0.01


class Carrier:
    """Carries frames between the mirrors of the hosts whose segments are given, in a thread, until `close`.

    Attributes:
        num_cuts, num_frames: connections that were cut, and frames that arrived.
        cut_every: about so many frames later all connections are cut once more; 0 = never.
        is_cut: no connection begins as long as it is set.
        error: what broke the thread.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        self._news = [os.eventfd(0, os.EFD_NONBLOCK) for _ in fds]
        self._lines: dict[tuple[int, int], deque[bytes]] = {}
        self._is_closing = False
        self._restarted: list[tuple[int, int]] = []
        self.num_cuts = self.num_frames = self.cut_every = 0
        self.is_cut = threading.Event()
        self.error: Exception | None = None
        self._mirrors = [self._open(host) for host in range(len(fds))]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def restart(self, host: int, fd: int) -> None:
        """Cut all connections; the host has another segment from then on."""
        self._restarted.append((host, fd))

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        for mirror in self._mirrors:
            mirror.close()
        for fd in self._news:
            os.close(fd)

    def _open(self, host: int) -> ExpertMirror:
        mirror = ExpertMirror.open(self._fds[host], host, len(self._fds), self._news[host])
        assert mirror is not None, "no rank has opened the segment"
        return mirror

    def _run(self) -> None:
        rng = random.Random(3)
        try:
            self._connect()
            while not self._is_closing:
                has_moved = self._carry(rng)
                if self.is_cut.is_set() or self._restarted or (self.cut_every and rng.random() * self.cut_every < 1):
                    self._cut()
                elif not has_moved:
                    select.select(self._news, [], [], _NAP_S)
                    for fd in self._news:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(fd)
        except Exception as error:
            self.error = error

    def _carry(self, rng: random.Random) -> bool:
        """Collect from all, then deliver a part: the order of frames is that of each connection alone."""
        for (sender, receiver), line in self._lines.items():
            while frame := self._mirrors[sender].collect(receiver):
                line.append(frame)
        arriving = [line for line in self._lines.items() if line[1]]
        rng.shuffle(arriving)
        for (sender, receiver), line in arriving:
            for _ in range(rng.randint(1, len(line))):
                self._mirrors[receiver].apply(sender, line.popleft())
                self.num_frames += 1
        return bool(arriving)

    def _pairs(self) -> list[tuple[int, int]]:
        return [(a, b) for a in range(len(self._fds)) for b in range(len(self._fds)) if a != b]

    def _connect(self) -> None:
        self._lines = {pair: deque() for pair in self._pairs()}
        for own, other in self._pairs():
            self._mirrors[own].begin(other)

    def _cut(self) -> None:
        self.num_cuts += 1
        for own, other in self._pairs():
            self._mirrors[own].lose(other)
        while self.is_cut.is_set() and not self._is_closing:
            self.is_cut.wait(_NAP_S)
        while self._restarted:
            host, self._fds[host] = self._restarted.pop()
            self._mirrors[host].close()
            self._mirrors[host] = self._open(host)
        self._connect()


@dataclass
class Hosts:
    """Ranks of several hosts, each with a segment (`parts`); all else is as in expert_model.Ranks."""

    layers: Sequence[Layer]
    parts: list[Ranks]
    services: list[ExpertService] = field(default_factory=list)

    def close(self) -> None:
        for service in self.services:
            service.abort()
        for service in self.services:
            service.close()

    def open_host(self, host: int) -> list[ExpertService]:
        part, per_host = self.parts[host], len(self.parts[0].placement) // len(self.parts)
        return [part.open(rank) for rank in range(host * per_host, (host + 1) * per_host)]


@contextlib.contextmanager
def hosts_of(
    num_hosts: int,
    layers: Sequence[Layer],
    placement: Placement,
    dtype: Any = np.float32,
    max_tokens: int = 64,
    timeout_s: float = 60.0,
) -> Iterator[tuple[Hosts, Carrier]]:
    """Give ranks that serve, all of which know that."""
    hosts = Hosts(layers, [Ranks(layers, placement, dtype, max_tokens, timeout_s) for _ in range(num_hosts)])
    with contextlib.ExitStack() as undo:
        for part in hosts.parts:
            undo.callback(os.close, part.fd)
        for host in range(num_hosts):
            hosts.services += hosts.open_host(host)
        undo.callback(hosts.close)
        carrier = Carrier([part.fd for part in hosts.parts])
        undo.callback(carrier.close)
        for service in hosts.services:
            service.wait_until_all_serve(60)
        yield hosts, carrier
        assert carrier.error is None, carrier.error
