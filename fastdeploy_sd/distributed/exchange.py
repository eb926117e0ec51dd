"""Exchanges the bytes of sums between nodes: the first rank of each other node is connected to rank 0.

Every node sends its bytes to rank 0, and gets all nodes' bytes from it. Only the first node listens, so a firewall must
know two ports of one address.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

from fastdeploy_sd.wire.sockets import Connection, CurveKeys, Hub, Listener, SendResult

_HEADER = struct.Struct("<Bq")  # kind, attempt
_HELLO, _DATA, _FAILED = range(3)
# The most bytes that a communicator exchanges at once, of the most nodes, with its header.
MAX_MESSAGE_BYTES = 4 * (1024 + (1 << 20)) + _HEADER.size
_MAX_QUEUED = 1000
_NAP_S = 0.2


class ExchangeError(Exception):
    """Bytes did not arrive, or are invalid."""


class _NodeExchange:
    """The common part of both ends; see device.communicator.Exchange. timeout_s: while this process runs."""

    def __init__(self, keys: CurveKeys, timeout_s: float) -> None:
        self._hub = Hub(keys)
        self._timeout_s = timeout_s
        self._attempt = 0
        self._failed: dict[int, int] = {}  # node -> the last attempt that failed there
        self._is_aborted = False
        self._abort_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._hub.watch(self._abort_fd)

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

    def abort(self) -> None:
        self._is_aborted = True
        os.eventfd_write(self._abort_fd, 1)

    def close(self) -> None:
        """No exchange may be running."""
        self._hub.close()
        os.close(self._abort_fd)

    def _wait(self, is_there: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Wait until `is_there`, which reads the frames that arrived."""
        left_s = self._timeout_s
        while not is_there():
            if self._is_aborted:
                raise ExchangeError("the ranks' group was aborted")
            for node, attempt in self._failed.items():
                if attempt >= self._attempt > 0:
                    raise ExchangeError(f"node {node} has failed")
            if left_s <= 0:
                raise ExchangeError(f"{missing()} did not come in time")
            before = time.monotonic()
            self._hub.wait(_NAP_S)
            left_s -= min(time.monotonic() - before, 2 * _NAP_S)

    def _frame(self, kind: int, data: bytes = b"") -> bytes:
        return _HEADER.pack(kind, self._attempt) + data


class FirstExchange(_NodeExchange):
    """Rank 0's end, which listens at host and port; raises ConfigError where these cannot be bound.

    `group`: a text that the others must name.
    """

    def __init__(self, keys: CurveKeys, host: str, port: int, group: str, num_nodes: int, timeout_s: float) -> None:
        super().__init__(keys, timeout_s)
        self._num_nodes, self._group = num_nodes, group
        self._identities: dict[int, bytes] = {}
        self._arrived: dict[int, tuple[int, bytes]] = {}  # node -> attempt, data
        try:
            self._listener = Listener(self._hub, host, port, MAX_MESSAGE_BYTES, _MAX_QUEUED, "node_port")
        except BaseException:
            self.close()
            raise

    def wait_connected(self) -> None:
        """Wait until all nodes are connected; raises ExchangeError where one is late."""
        self._wait(
            lambda: self._receive() or len(self._identities) == self._num_nodes - 1,
            lambda: f"the connection of {self._names(self._identities)}",
        )

    def exchange(self, data: bytes) -> bytes:
        others: dict[int, bytes] = {}

        def is_there() -> bool:
            self._receive()
            for node, (attempt, theirs) in list(self._arrived.items()):
                del self._arrived[node]
                if attempt == self._attempt:
                    others[node] = theirs
            return len(others) == self._num_nodes - 1

        self._wait(is_there, lambda: self._names(others))
        gathered = b"".join((data, *(others[node] for node in sorted(others))))
        for node in others:
            if self._send(node, self._frame(_DATA, gathered)) is not SendResult.QUEUED:
                raise ExchangeError(f"node {node} has closed its connection")
        return gathered

    def fail(self) -> None:
        for node in self._identities:
            self._send(node, self._frame(_FAILED))

    def _names(self, there: dict[int, bytes]) -> str:
        return ", ".join(f"node {node}" for node in range(1, self._num_nodes) if node not in there)

    def _send(self, node: int, frame: bytes) -> SendResult:
        return self._listener.send(self._identities[node], frame, [])

    def _receive(self) -> bool:
        """Handle the frames that arrived; returns False, for use in conditions."""
        for identity, frame in self._listener.receive():
            if len(frame) < _HEADER.size:
                continue
            kind, attempt = _HEADER.unpack_from(frame)
            data = frame[_HEADER.size :]
            if kind == _HELLO:
                self._greet(identity, attempt, data)
                continue
            node = next((n for n, known in self._identities.items() if known == identity), None)
            if node is None:  # a node of an earlier group
                continue
            if kind == _FAILED:
                self._failed[node] = attempt
            else:
                self._arrived[node] = (attempt, data)
        return False

    def _greet(self, identity: bytes, node: int, group: bytes) -> None:
        if group == self._group.encode() and 0 < node < self._num_nodes:
            self._identities[node] = identity  # the last one: earlier connections may have failed
            self._send(node, self._frame(_HELLO))


class OtherExchange(_NodeExchange):
    """The end of the first rank of another node, to rank 0 at "tcp://host:port"; `connect` comes first."""

    def __init__(self, keys: CurveKeys, address: str, group: str, node: int, timeout_s: float) -> None:
        super().__init__(keys, timeout_s)
        self._address, self._hello = address, _HEADER.pack(_HELLO, node) + group.encode()
        self._link: Connection | None = None
        self._got: bytes | None = None

    def connect(self) -> None:
        """Connect to rank 0, which may still be loading; raises ExchangeError where it does not answer in time."""
        self._wait(self._is_greeted, lambda: f"an answer of node 0 at {self._address}")
        self._got = None

    def exchange(self, data: bytes) -> bytes:
        assert self._link is not None, "exchange() before connect()"
        self._got = None
        if not self._link.send(self._frame(_DATA, data)):
            raise ExchangeError("node 0 does not read")
        self._wait(self._has_answered, lambda: "node 0")
        return self._got or b""

    def fail(self) -> None:
        if self._link is not None:
            self._link.send(self._frame(_FAILED))

    def _is_greeted(self) -> bool:
        if self._link is None:
            self._link = Connection(self._hub, self._address, MAX_MESSAGE_BYTES, _MAX_QUEUED)
            self._link.send(self._hello)
        try:
            return self._has_answered()
        except ExchangeError:
            self._link.close()
            self._link = None
            return False

    def _has_answered(self) -> bool:
        assert self._link is not None
        for [part] in self._link.receive():
            kind, attempt = _HEADER.unpack_from(part)
            if kind == _FAILED:
                self._failed[0] = attempt
            elif attempt == self._attempt:
                self._got = bytes(part[_HEADER.size :])
        if self._got is None and (loss := self._link.loss()) is not None:
            raise ExchangeError(f"node 0: {loss}")
        return self._got is not None
