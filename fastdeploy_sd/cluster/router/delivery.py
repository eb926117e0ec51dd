"""What a client gets as instances' answers come, and which of these are failures of an instance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.types import Send

from fastdeploy_sd.cluster.route import NOT_AUTHENTIC
from fastdeploy_sd.cluster.stream_metadata import StreamEvent
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.wire.http.auth import client_of
from fastdeploy_sd.wire.http.error_format import failed_end, to_fdsd_error
from fastdeploy_sd.wire.http.event_stream import EVENT_ENDS
from fastdeploy_sd.wire.http_client import Headers

# Answers that say that the instance cannot, not that the request is wrong.
INSTANCE_STATUSES = frozenset({429, 502, 503, 504})
# Codes of a 403 that is no client's doing.
AGAINST_ROUTERS = frozenset({NOT_AUTHENTIC, "host_not_allowed"})


@dataclass(frozen=True, slots=True)
class Failure:
    """A request failed at an instance, and may go on elsewhere; else a client is told the error.

    `is_refusal`: the instance answered, and said that it cannot.
    """

    error: FdsdError
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An instance's answer that it cannot."""

    status: int
    headers: Headers
    body: bytes


def error_of(body: bytes) -> tuple[str, str]:
    """Return code and message of an instance's error, "" where it has none."""
    try:
        value = json.loads(body)
        error = value["error"]
        if isinstance(error, str):  # Ollama's form
            return str(value["code"]), error
        return str(error["code"]), str(error["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return "", ""


def event_end(headers: Headers) -> bytes | None:
    """Return what ends each event of an answer, None = it is no stream."""
    media_type = next((value.partition(b";")[0] for name, value in headers if name == b"content-type"), b"")
    return EVENT_ENDS.get(media_type.decode("latin-1"))


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
