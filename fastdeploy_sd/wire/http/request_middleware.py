"""The outermost middleware: every request gets exactly one answer in our form, and is counted once.

Only this module decides what an exception, a client that leaves or a shutdown means for the answer and for the log.
Knows no route and no key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy_sd.errors import (
    MAX_SHOWN_CHARS,
    FdsdError,
    HeadersTooLarge,
    MisframedRequest,
    Unavailable,
    UnsupportedMediaType,
    shown,
)
from fastdeploy_sd.metrics import HttpStats
from fastdeploy_sd.wire.http.error_format import error_response, to_fdsd_error
from fastdeploy_sd.wire.http.request_record import RequestRecord, begin_record
from fastdeploy_sd.wire.http.tracing import RequestTracer

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499  # nginx's status for its log; no client receives it
# The parser stops at as much of a head that is not complete; one that came in a single piece may be longer.
_MAX_HEAD_BYTES = 1 << 16
_LINE_BYTES = len(b": \r\n")


class RequestMiddleware:
    """Answers every exception, counts every request and, where wanted, logs a line for each and reports it as a span.

    HEAD is answered as GET without the body; a target with scheme and host (RFC 9112, 3.2.2) as its path alone.
    """

    def __init__(self, app: ASGIApp, stats: HttpStats, has_log: bool, tracer: RequestTracer | None = None) -> None:
        self._app = app
        self._tracer = tracer
        self._stats = stats
        self._has_log = has_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        inner = _normalized(scope)
        record = begin_record(inner)
        span = None if self._tracer is None else self._tracer.begin(inner)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            error = await self._error_of(inner, receive, noting)
            if error is not None and record.status == 0:
                await error_response(error)(inner, receive, noting)
        finally:
            route = self._close(record, inner, scope["method"])
            if span is not None:
                span.end(record, route)

    async def _error_of(self, scope: Scope, receive: Receive, send: Send) -> FdsdError | None:
        try:
            _verify_head(scope)
            _verify_encoding(scope)
            await self._app(scope, receive, send)
        except (ClientDisconnect, OSError):
            return None  # the client has left
        except asyncio.CancelledError:  # only the end of the server cancels
            return Unavailable("the server shut down before the request finished", code="draining")
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # also a panic of a Rust extension, which is no Exception
            return to_fdsd_error(error, HttpRequest(scope))
        return None

    def _close(self, record: RequestRecord, scope: Scope, method: str) -> str:
        """Count and log a request that has been answered, and return its route."""
        record.status = record.status or _CLIENT_CLOSED_REQUEST
        route = getattr(scope.get("route"), "path", "other")  # a path of the client's own could be any
        self._stats.requests[route, str(record.status), record.reason] += 1
        if self._has_log:
            fields = _fields(record, scope, method)
            logger.info(
                "%s", " ".join(f"{name}={_word(value)}" for name, value in fields.items()), extra={"fields": fields}
            )
        return str(route)


def _normalized(scope: Scope) -> Scope:
    scope = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
    if scope["path"].lower().startswith(("http://", "https://")):
        scope["path"] = "/" + scope["path"].partition("://")[2].partition("/")[2]
        scope["raw_path"] = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return scope


def _verify_head(scope: Scope) -> None:
    """Refuse a head that is too large, or says in two ways where the body ends (RFC 9112, 6.1)."""
    headers = scope["headers"]
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) + _LINE_BYTES for name, value in headers)
    if num_bytes > _MAX_HEAD_BYTES:
        message = f"request: expected at most {_MAX_HEAD_BYTES} bytes of request line and headers, got {num_bytes}"
        raise HeadersTooLarge(message)
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise MisframedRequest("request: expected either Content-Length or Transfer-Encoding, got both")


def _verify_encoding(scope: Scope) -> None:
    encoding = Headers(scope=scope).get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding: expected identity, got {shown(encoding)}"
        raise UnsupportedMediaType(message, code="unsupported_encoding")


def _fields(record: RequestRecord, scope: Scope, method: str) -> dict[str, Any]:
    """What is logged of a request, without spaces: what a client has sent of it cannot be mistaken for others."""
    client = scope.get("client")
    fields = {
        "client": f"{client[0]}:{client[1]}" if client else "-",
        "method": method,
        "path": scope["raw_path"].decode("ascii", "replace")[:MAX_SHOWN_CHARS],
        "status": record.status,
        "duration_s": round(time.monotonic() - record.started, 3),
        "error": record.reason,
        "id": record.request_id,
        "model": record.model,
    }
    if record.usage is not None:
        usage = record.usage()
        fields |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    if record.metrics and record.metrics[-1].gain:
        fields["gain"] = round(record.metrics[-1].gain, 3)
    return {name: value for name, value in fields.items() if value != ""}


def _word(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
