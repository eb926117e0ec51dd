"""Errors as JSON in the form of their route, status and headers, and as the last event of a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy_sd.errors import (
    MAX_SHOWN_CHARS,
    FdsdError,
    HeadersTooLarge,
    InternalError,
    MisframedRequest,
    Unauthorized,
)
from fastdeploy_sd.wire.http.event_stream import DONE
from fastdeploy_sd.wire.http.request_record import record_of

logger = logging.getLogger(__name__)

RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
EMBEDDINGS_PATH = "/v1/embeddings"
INFILL_PATH = "/infill"  # of llama.cpp
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
# Status -> Anthropic's word, where it is another one.
_MESSAGE_ERRORS = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_OLLAMA = "/api/"
StreamError = Callable[[FdsdError, int], str]


def error_json(error: FdsdError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def message_error_json(error: FdsdError) -> dict[str, Any]:
    """Return an error in Anthropic's form, and its code where it has one, which routers read."""
    told = {"type": _MESSAGE_ERRORS.get(error.status, error.type), "message": error.message}
    return {"type": "error", "error": told | _code(error)}


def line_error_json(error: FdsdError) -> dict[str, Any]:
    """Return an error in Ollama's form, and its code where it has one."""
    return {"error": error.message} | _code(error)


def _code(error: FdsdError) -> dict[str, str]:
    return {} if error.code is None else {"code": error.code}


def error_response(error: FdsdError) -> Response:
    """Return the HTTP response for an error, with Retry-After or WWW-Authenticate where they belong.

    One about the head of the request itself closes the connection.
    """
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (HeadersTooLarge, MisframedRequest)):
        headers["Connection"] = "close"
    return _ErrorResponse(error, headers)


def to_fdsd_error(error: BaseException, request: HttpRequest) -> FdsdError:
    """Return an error a user may see. One of a foreign type is our fault: the log has it, the user gets no detail."""
    if not isinstance(error, FdsdError):
        logger.error("%s %s failed", request.method, request.url.path[:MAX_SHOWN_CHARS], exc_info=error)
        error = InternalError("the server failed on this request; its log says why")
    record_of(request.scope).reason = _reason(error)
    return error


def _reason(error: FdsdError) -> str:
    return error.code or error.type


def to_json(value: object) -> str:
    """Return compact JSON; characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_pieces(value: object, depth: int) -> Iterator[str]:
    """Yield what `to_json` returns in pieces, none of which takes long, as the interpreter makes a piece in one go;
    `depth`: how deep lists and maps are split.
    """
    if depth and isinstance(value, dict):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{to_json(key)}:"
            yield from json_pieces(item, depth - 1)
            opening = ","
        yield "}" if value else "{}"
    elif depth and isinstance(value, list):
        opening = "["
        for item in value:
            yield opening
            yield from json_pieces(item, depth - 1)
            opening = ","
        yield "]" if value else "[]"
    else:
        yield to_json(value)


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return to_json(content).encode("utf-8")


class _ErrorResponse(JsonResponse):
    """An error as a response, which notes itself in the request's record."""

    def __init__(self, error: FdsdError, headers: Mapping[str, str]) -> None:
        super().__init__(error_json(error), error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).reason = _reason(self._error)
        self.body = self.render(_form_of(scope["path"])(self._error))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _form_of(path: str) -> Callable[[FdsdError], dict[str, Any]]:
    if path in (MESSAGES_PATH, COUNT_TOKENS_PATH):
        return message_error_json
    return line_error_json if path.startswith(_OLLAMA) else error_json


def chunk_error(error: FdsdError, num_events: int) -> str:
    """Return the event of a stream of chunks, whose events have no numbers."""
    return f"data: {to_json(error_json(error))}\n\n"


def response_error(error: FdsdError, num_events: int) -> str:
    """Return the event of a stream of /v1/responses; `num_events`: that were sent before it."""
    value = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
    return f"event: error\ndata: {to_json(value | {'sequence_number': num_events})}\n\n"


def message_error(error: FdsdError, num_events: int) -> str:
    """Return the event of a stream of /v1/messages, whose events have no numbers."""
    return f"event: error\ndata: {to_json(message_error_json(error))}\n\n"


def line_error(error: FdsdError, num_events: int) -> str:
    """Return the last line of a stream of Ollama's routes."""
    return to_json(line_error_json(error)) + "\n"


def failed_end(path: str) -> StreamError:
    """Return what makes the end of a failed stream of a route: the error, and what follows all events."""
    if path == RESPONSES_PATH:
        return response_error
    if path == MESSAGES_PATH:
        return message_error
    if path.startswith(_OLLAMA):
        return line_error
    if path == INFILL_PATH:
        return chunk_error
    return lambda error, num_events: chunk_error(error, num_events) + DONE
