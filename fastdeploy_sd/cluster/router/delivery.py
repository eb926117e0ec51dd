"""What a client gets, as instances' answers come: heads and bodies as they are, or an error in our form."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.types import Send

from fastdeploy_sd.cluster.stream_metadata import StreamEvent
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.wire.http.auth import client_of
from fastdeploy_sd.wire.http.error_format import to_fdsd_error
from fastdeploy_sd.wire.http.stream_errors import failed_end
from fastdeploy_sd.wire.http_client import Headers

# Of an instance's answer; the router's own server writes others.
_OWN_HEADERS = frozenset({b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding"})


class Delivery:
    """One answer to a client; `has_started` once that has got anything."""

    def __init__(self, request: HttpRequest, send: Send) -> None:
        self.has_started, self.client = False, client_of(request.scope)
        self._request = request
        self._send = send
        self._is_stream = False
        self._num_events = 0

    async def send_events(self, status: int, headers: Headers, events: Sequence[StreamEvent]) -> None:
        """Send events of a stream; its head before the first ones."""
        if not self.has_started:
            self._is_stream = True
            await self.start(status, headers)
        self._num_events += sum(event.num_events for event in events)
        await self.send(b"".join(event.data for event in events))

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer that is complete."""
        await self.start(status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        kept = [(name, value) for name, value in headers if name not in _OWN_HEADERS]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def send(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: FdsdError) -> None:
        """End a stream with an error; raised if nothing was sent, ConnectionResetError if that is no stream."""
        if not self.has_started:
            raise error
        if not self._is_stream:
            raise ConnectionResetError(error.message)
        end = failed_end(self._request.url.path)
        await self.send(end(to_fdsd_error(error, self._request), self._num_events).encode("utf-8"))
        await self.end()
