"""Which answers of an instance are its own failures, not what is wrong with a request. Knows no connection."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fastdeploy_sd.cluster.route import NOT_AUTHENTIC
from fastdeploy_sd.errors import FdsdError
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
        error = json.loads(body)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return "", ""


def is_stream(headers: Headers) -> bool:
    """Whether an answer is a stream of events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
