"""Accepts connections, with limits in total and per address, and survives a lack of descriptors.

asyncio's own accept loop would go on accepting without a limit and, when there is no descriptor left, log a traceback
for each place of the backlog. Knows nothing of HTTP but the bytes of one refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable

from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.wire.http.connection import Connection, Connections, raw_answer

logger = logging.getLogger(__name__)

MakeConnection = Callable[[Callable[[], None]], Connection]

# So many at a time: other connections have their turn between two batches.
_BATCH = 16
# What a process opens in addition to connections and the descriptors that it has when it starts to serve.
_RESERVED_DESCRIPTORS = 24
_PAUSE_S = 0.5
_QUIET_S = 60.0
_DISCARDED_BYTES = 1 << 16
_IPV6_HOST_BITS = 64  # a subscriber may use every address that differs in these only


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Acceptor:
    """Accepts on a listening socket, which others may share, from `start` until `stop`.

    Beyond `max_connections` a new connection takes the place of the one that has been without a request for longest;
    when every one has a request in progress, it is answered 503 and closed. Likewise beyond
    `max_connections_per_address`, where no other client's place is taken.

    Args:
        listener: made non-blocking; stays open.
        make: returns the protocol of a new connection, which calls the given function when it has ended.
    """

    def __init__(self, listener: socket.socket, shared: Connections, make: MakeConnection) -> None:
        self._listener = listener
        self._shared = shared
        self._make = make
        self._limit = _connection_limit(shared.server.max_connections)
        self._per_address: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._quiet_until = 0.0
        listener.setblocking(False)

    def start(self) -> None:
        """Accept from now on, in the running event loop."""
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Accept nothing any more; open connections go on."""
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if self._is_full and self._tasks and not self._shared.waiting:
                return  # a connection that is being set up may give way, but only once it is served
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._take(accepted, _address_key(address[0]))

    def _pause(self, error: OSError) -> None:
        """The system has no room for another connection; what waits in the backlog is tried again soon."""
        self.stop()
        self._retry = asyncio.get_running_loop().call_later(_PAUSE_S, self.start)
        self._shared.stats.refused["system"] += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_S
            logger.error("new connections wait, as none can be accepted: %s", error.strerror or error)

    def _take(self, accepted: socket.socket, key: str) -> None:
        per_address = self._shared.server.max_connections_per_address
        if per_address is not None and self._per_address[key] >= per_address:
            self._refuse(accepted, "address_limit", f"{per_address} from one address (max_connections_per_address)")
        elif self._is_full and not self._make_room():
            self._refuse(accepted, "limit", f"{self._limit} (max_connections)")
        else:
            self._shared.stats.num_accepted += 1
            self._shared.stats.num_open += 1
            self._per_address[key] += 1
            task = asyncio.get_running_loop().create_task(self._serve(accepted, key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def _is_full(self) -> bool:
        return self._shared.stats.num_open >= self._limit

    def _make_room(self) -> bool:
        longest = next(iter(self._shared.waiting), None)
        if longest is None:
            return False
        longest.make_room()
        return True

    def _refuse(self, accepted: socket.socket, reason: str, limit: str) -> None:
        self._shared.stats.refused[reason] += 1
        error = Unavailable(f"connections: expected at most {limit}, got another one", code="too_many_connections")
        with accepted, contextlib.suppress(OSError):
            accepted.setblocking(False)
            accepted.send(raw_answer(error))
            accepted.shutdown(socket.SHUT_WR)
            accepted.recv(_DISCARDED_BYTES)  # closing with unread bytes would take the answer back

    async def _serve(self, accepted: socket.socket, key: str) -> None:
        connection = self._make(lambda: self._count_out(key))
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # find out when the peer's machine is gone
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # it ended before it began
            accepted.close()
            self._count_out(key)

    def _count_out(self, key: str) -> None:
        self._shared.stats.num_open -= 1
        self._per_address[key] -= 1
        if not self._per_address[key]:
            del self._per_address[key]


def _connection_limit(wanted: int) -> int:
    """As many connections as are wanted and as there are descriptors for; a line says so when these are fewer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = max(1, soft - len(os.listdir("/proc/self/fd")) - _RESERVED_DESCRIPTORS)
    if room < wanted:
        logger.warning("max_connections is %d, but the limit of open files (%d) leaves room for %d", wanted, soft, room)
    return min(wanted, room)


def _address_key(host: str) -> str:
    """What counts as one address: an IPv4 address, or the network that an IPv6 subscriber has."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:  # noqa: PLR2004 (that of IPv4)
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> _IPV6_HOST_BITS:x}"
