"""Requests to other servers over HTTP/1.1: a connection that the other side lets open serves the next request too.

h11 does the protocol and asyncio the sockets. Answers are read piece by piece, as they come. Knows no TLS (as our
servers), no redirect, and nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import h11

from fastdeploy_sd.errors import Unavailable

Headers = Sequence[tuple[bytes, bytes]]

_READ_BYTES = 1 << 16
# Shorter than what servers let a connection idle (timeout_keep_alive, 5 s by default).
_MAX_IDLE_S = 4.0
_MAX_IDLE_CONNECTIONS = 64  # per server


class BrokenError(Unavailable):
    """The other side could not be reached, or its answer ended before its end."""

    retry_after_s = 1


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the place of "HOST:PORT", which is known to be one."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `headers` without Host and without those of the connection and the body's length."""

    method: str
    path: str
    headers: Headers = ()
    body: bytes = b""


class Exchange:
    """One request and its answer on a connection. Close it, whatever happens; `abort` may be called by others."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = 0
        self.headers: Headers = ()

    def abort(self) -> None:
        """End the connection now; a task that waits for it gets BrokenError."""
        self._connection.abort()

    async def read(self) -> bytes:
        """Return the next piece of the body, b"" at its end; BrokenError: the connection ended first."""
        return await self._connection.read_body()

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the body, or as many bytes of it, and some more, as tell that it has more than `max_bytes`;
        BrokenError: the connection ended first.
        """
        pieces: list[bytes] = []
        num_bytes = 0
        while num_bytes <= max_bytes and (piece := await self.read()):
            pieces.append(piece)
            num_bytes += len(piece)
        return b"".join(pieces)


class HttpClient:
    """Asks servers, from one event loop; `connect_timeout_s`: how long a connection may take to come about."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Target, list[tuple[float, _Connection]]] = {}

    async def ask(self, target: Target, ask: Ask, exchanges: set[Exchange] | None = None) -> Exchange:
        """Send a request and return when the answer's headers are here. The caller must give it to `finish`.

        A connection that has served before may have been closed at this very moment; then there is another one.
        `exchanges` holds the exchange from before the first byte on, for a task that wants to abort it.
        """
        while True:
            kept = self._take_idle(target)
            connection = kept or await self._connect(target)
            exchange = Exchange(connection)
            if exchanges is not None:
                exchanges.add(exchange)
            try:
                head = await connection.request(target, ask)
            except BaseException as error:
                was_closed = kept is not None and isinstance(error, BrokenError) and not connection.is_aborted
                connection.abort()
                if exchanges is not None:
                    exchanges.discard(exchange)
                if not was_closed:
                    raise
                continue
            exchange.status, exchange.headers = head.status_code, list(head.headers)
            return exchange

    async def fetch(self, target: Target, ask: Ask, max_bytes: int, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the body of a short answer; of a longer one some bytes more than `max_bytes`.

        Raises TimeoutError: it took longer. BrokenError: as `ask` and `Exchange.read`.
        """
        async with asyncio.timeout(timeout_s):
            exchange = await self.ask(target, ask)
            try:
                return exchange.status, await exchange.read_all(max_bytes)
            finally:
                self.finish(target, exchange)

    def finish(self, target: Target, exchange: Exchange, exchanges: set[Exchange] | None = None) -> None:
        """Keep the connection for another request when it is fit for one, else end it."""
        if exchanges is not None:
            exchanges.discard(exchange)
        connection = exchange._connection
        idle = self._idle.setdefault(target, [])
        if connection.is_reusable and len(idle) < _MAX_IDLE_CONNECTIONS:
            connection.begin_next()
            idle.append((time.monotonic(), connection))
        else:
            connection.abort()

    def close(self) -> None:
        for connections in self._idle.values():
            for _, connection in connections:
                connection.abort()
        self._idle.clear()

    def _take_idle(self, target: Target) -> _Connection | None:
        idle = self._idle.get(target, [])
        while idle:
            since, connection = idle.pop()
            if time.monotonic() - since < _MAX_IDLE_S and not connection.is_closing:
                return connection
            connection.abort()
        self._idle.pop(target, None)
        return None

    async def _connect(self, target: Target) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                reader, writer = await asyncio.open_connection(target.host, target.port)
        except TimeoutError:
            text = f"{target} did not take a connection within {self._connect_timeout_s:g} s"
            raise BrokenError(text, code="unreachable") from None
        except OSError as error:
            raise BrokenError(f"{target} cannot be reached: {error}", code="unreachable") from None
        return _Connection(reader, writer)


class _Connection:
    """A socket and the state of the protocol on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self.is_aborted = False

    @property
    def is_closing(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    @property
    def is_reusable(self) -> bool:
        states = {self._protocol.our_state, self._protocol.their_state}
        return states == {h11.DONE} and not self.is_closing

    def begin_next(self) -> None:
        self._protocol.start_next_cycle()

    def abort(self) -> None:
        self.is_aborted = True
        self._writer.transport.abort()

    async def request(self, target: Target, ask: Ask) -> h11.Response:
        own = [(b"host", str(target).encode()), (b"content-length", str(len(ask.body)).encode())]
        head = h11.Request(method=ask.method, target=ask.path, headers=[*own, *ask.headers])
        try:
            parts = (head, h11.Data(data=ask.body), h11.EndOfMessage())
            self._writer.write(b"".join(self._protocol.send(part) or b"" for part in parts))
            await self._writer.drain()
        except OSError:
            raise _broken() from None
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        if not isinstance(event, h11.Response):
            raise _broken()
        return event

    async def read_body(self) -> bytes:
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                if event.data:
                    return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return b""
            else:
                raise _broken()

    async def _next(self) -> h11.Event:
        try:
            while True:
                event = self._protocol.next_event()
                if event is h11.NEED_DATA:
                    self._protocol.receive_data(await self._reader.read(_READ_BYTES))
                elif event is h11.PAUSED:
                    raise _broken()
                else:
                    assert not isinstance(event, type), "h11 has two signals"
                    return event
        except (OSError, h11.RemoteProtocolError):
            raise _broken() from None


def _broken() -> BrokenError:
    """What clients of a router read; how HTTP broke would tell them nothing."""
    return BrokenError("the connection was closed before the answer was complete", code="broken_connection")
