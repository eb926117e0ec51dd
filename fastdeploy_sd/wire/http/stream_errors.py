"""How a stream that has begun reports a failure, by route; the same for a router and a server."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.wire.http.error_format import error_json, to_json
from fastdeploy_sd.wire.http.event_stream import DONE

RESPONSES_PATH = "/v1/responses"
StreamError = Callable[[FdsdError, int], str]


def chunk_error(error: FdsdError, num_events: int) -> str:
    """Return the event of a stream of chunks, whose events have no numbers."""
    return f"data: {to_json(error_json(error))}\n\n"


def response_error(error: FdsdError, num_events: int) -> str:
    """Return the event of a stream of /v1/responses.

    Args:
        num_events: that were sent before it.
    """
    value = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
    return f"event: error\ndata: {to_json(value | {'sequence_number': num_events})}\n\n"


def failed_end(path: str) -> StreamError:
    """Return what makes the end of a failed stream of a route: the error, and what follows all events."""
    if path == RESPONSES_PATH:
        return response_error
    return lambda error, num_events: chunk_error(error, num_events) + DONE
