"""One HTTP/1.1 connection: uvicorn's, with deadlines until a request is complete and with our JSON for its errors.

A peer may be no real client, and it has shown no key yet. So what a connection may cost is bounded here before
anything reaches the application: how long it may stay silent, how slowly it may send, and how much it may send that
is not read. Knows no route and no engine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.errors import (
    MAX_SHOWN_CHARS,
    BadRequest,
    FdsdError,
    HeadersTooLarge,
    PayloadTooLarge,
    RequestTimeout,
)
from fastdeploy_sd.metrics import HttpStats
from fastdeploy_sd.wire.http.error_format import error_json, to_json


class GatheredWrites:
    """A transport whose `write` waits for the end of the turn. All else is the transport's own.

    What comes together is bounded by what one turn writes; from then on the transport's own flow control holds.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the bytes, after those of this turn before them."""
        if data:
            if not self._pieces:
                self._loop.call_soon(self._flush)
            self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(b"".join(pieces))


# A body may come slowly, but not for ever: beyond the first `timeout_body` seconds its mean rate is at least this.
MIN_BODY_BYTES_PER_S = 1024
# So many times the largest body is read, and dropped, after an answer: a connection that is closed while bytes of it
# arrive takes the answer away from the client, who then learns of no reason.
_MAX_DROPPED_BODIES = 8


def raw_answer(error: FdsdError) -> bytes:
    """Return a whole HTTP response that closes the connection, for where there is no request to answer."""
    body = to_json(error_json(error)).encode("utf-8")
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


@dataclass(slots=True)
class Connections:
    """What the connections of a process share; `waiting` have no request in progress, the longest first."""

    server: ServerConfig
    stats: HttpStats
    waiting: dict[Connection, None] = field(default_factory=dict)


class Connection(H11Protocol):
    """A connection from its first byte to its last.

    Its headers must be complete `timeout_headers` seconds after it began to wait for them. A body may pause for
    `timeout_body` seconds, and after as many it must have come at MIN_BODY_BYTES_PER_S or faster. A request that is too
    late is answered 408; one that has not even begun is just closed. The body of a request that has been answered
    already is read, and dropped, up to a few times the size limit of a body, so that the client gets its answer.
    `on_lost`: called once, when the connection has ended.
    """

    def __init__(
        self, shared: Connections, config: uvicorn.Config, state: ServerState, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(config, state, {})
        self.timeout_keep_alive = shared.server.keep_alive_timeout_s
        self._shared = shared
        self._on_lost = on_lost
        self._timer: asyncio.TimerHandle | None = None
        self._is_timing_body = False
        self._has_sent = False  # any byte of the request that it now waits for
        self._body_since = 0.0
        self._last_byte = 0.0
        self._num_body_bytes = 0

    # ---- what asyncio and uvicorn call ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(GatheredWrites(transport, self.loop))  # type: ignore[arg-type]
        self._shared.waiting[self] = None
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._shared.waiting.pop(self, None)
        self._stop_timer()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Take what came, then see what is missing."""
        self._has_sent = True
        if self._is_timing_body:
            self._last_byte = self.loop.time()
            self._num_body_bytes += len(data)
        super().data_received(data)
        if self._num_chunk_bytes_left > self._max_dropped_bytes:
            message = f"body: expected at most {self._shared.server.max_body_bytes} bytes, got a chunk of more"
            self._reject(PayloadTooLarge(message, code="body_too_large"), "surplus_body")
        self._follow()

    def on_response_complete(self) -> None:
        """Go on with the next request, or with the rest of this one's body."""
        self._has_sent = False
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request; uvicorn calls this while it handles the parser's exception."""
        reason = sys.exception()
        hint = getattr(reason, "error_status_hint", HTTPStatus.BAD_REQUEST)
        kind = HeadersTooLarge if hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE else BadRequest
        self._reject(kind(f"request: expected HTTP/1.1, got {reason or msg}"[:MAX_SHOWN_CHARS]), "malformed")

    # ---- deadlines --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Have the right deadline for what the client owes us now, if anything."""
        state = self.conn.their_state
        if state is h11.IDLE and not self.transport.is_closing():
            self._shared.waiting.setdefault(self)
        else:
            self._shared.waiting.pop(self, None)
        if state is h11.SEND_BODY:
            self._time_body()
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._time_headers()
        else:
            self._stop_timer()

    def _time_headers(self) -> None:
        if self._timer is None or self._is_timing_body:
            self._start_timer(self._shared.server.headers_timeout_s, is_for_body=False)

    def _time_body(self) -> None:
        if not self._is_timing_body:
            self._restart_body_clock()
            self._start_timer(self._shared.server.body_timeout_s, is_for_body=True)
        elif self.cycle.response_complete and self._num_body_bytes > self._max_dropped_bytes:
            self._give_up("surplus_body")

    @property
    def _max_dropped_bytes(self) -> int:
        return _MAX_DROPPED_BODIES * self._shared.server.max_body_bytes

    @property
    def _num_chunk_bytes_left(self) -> int:
        """How much of a chunk has been announced and has not come."""
        # The parser says it nowhere else, and a client may announce more than it ever sends.
        return getattr(getattr(self.conn, "_reader", None), "_bytes_in_chunk", 0)

    def _restart_body_clock(self) -> None:
        self._body_since = self._last_byte = self.loop.time()
        self._num_body_bytes = 0

    def _start_timer(self, delay_s: float, *, is_for_body: bool) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, self._meet_deadline)
        self._is_timing_body = is_for_body

    def _stop_timer(self) -> None:
        self._is_timing_body = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _meet_deadline(self) -> None:
        """The timer has fired: what it waits for is late, unless bytes have come meanwhile."""
        self._timer = None
        if not self._is_timing_body:
            error = RequestTimeout("request: expected the headers in time, got only a part of them")
            self._reject(error if self._has_sent else None, "headers_timeout")
            return
        timeout_s = self._shared.server.body_timeout_s
        if self.flow.read_paused:  # it is the application that has not read on
            self._restart_body_clock()
        slowest_end = self._body_since + timeout_s + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        left_s = min(self._last_byte + timeout_s, slowest_end) - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._meet_deadline)
        else:
            self._reject(RequestTimeout("body: expected the rest of it in time, got only a part"), "body_timeout")

    # ---- the end ----------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Close: another connection needs the place more than this one, which has no request."""
        self._give_up("room")

    def _reject(self, error: FdsdError | None, reason: str) -> None:
        """Close; before that, tell the client why, unless an answer is on its way or has been sent."""
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_started and not cycle.response_complete
        is_body_owed = cycle is not None and cycle.response_complete and self._is_timing_body
        if error is not None and not is_answered and not is_body_owed and not self.transport.is_closing():
            self.transport.write(raw_answer(error))
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if self.transport.is_closing():
            return
        self._shared.stats.closed[reason] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing may follow what has been written
            self.cycle.message_event.set()
        self._shared.waiting.pop(self, None)
        self._stop_timer()
        self.transport.close()
