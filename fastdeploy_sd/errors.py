"""Exceptions with the HTTP status and the OpenAI error type each one maps to. Knows no HTTP framework."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FdsdError(Exception):
    """Base of every error a user can see.

    Attributes:
        status: HTTP status code.
        type: OpenAI error type.
        param: the request field or option at fault, or None.
        code: short machine-readable reason, or None.
    """

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(FdsdError):
    """The request can never succeed: names the field, what was expected and what came."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(FdsdError):
    """Missing or wrong API key."""

    status = 401
    type = "authentication_error"


class NotFound(FdsdError):
    """Unknown route or model."""

    status = 404
    type = "not_found_error"


class PayloadTooLarge(FdsdError):
    """The body exceeds the configured size."""

    status = 413
    type = "invalid_request_error"


class Overloaded(FdsdError):
    """The queue is full. `retry_after_s` goes into the Retry-After header."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1, param: str | None = None) -> None:
        super().__init__(message, param=param, code="queue_full")
        self.retry_after_s = retry_after_s


class InternalError(FdsdError):
    """Our fault: a broken invariant or a failed computation for this request only."""


class Unavailable(FdsdError):
    """The server is draining or its engine is down."""

    status = 503
    type = "service_unavailable_error"


class ConfigError(FdsdError, ValueError):
    """An option, YAML key or checkpoint is wrong; raised before anything is served."""

    status = 400
    type = "config_error"


class CheckpointError(ConfigError):
    """A checkpoint file is malformed, incomplete or of an unsupported kind."""


ERROR_TYPES: dict[str, type[FdsdError]] = {
    cls.__name__: cls
    for cls in (
        BadRequest,
        Unauthorized,
        NotFound,
        PayloadTooLarge,
        Overloaded,
        InternalError,
        Unavailable,
        ConfigError,
    )
}


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest known name, or "" when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
