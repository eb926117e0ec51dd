"""Ports for servers that must be told theirs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

# Below the ports that a system gives to a socket that connects or lets it choose, so no process gets one meanwhile;
# each process of these tests has its own, and gives none out twice.
_COUNT = 2_000
_FIRST = 10_000 + _COUNT * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10)
# A concurrent run of the tests hardly begins at the same.
_begins = itertools.cycle(random.SystemRandom().sample(range(_FIRST, _FIRST + _COUNT, 4), _COUNT // 4))


def free_ports(count: int) -> list[int]:
    """Neighbouring free ports of the first host; up to 4."""
    for begin in itertools.islice(_begins, _COUNT // 4):
        ports = list(range(begin, begin + count))
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in ports:
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
    raise AssertionError(f"no {count} neighbouring ports are free")


def free_port() -> int:
    """A free port of the first host, whose next port is free too."""
    return free_ports(2)[0]
