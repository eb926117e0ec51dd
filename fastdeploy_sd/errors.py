"""Exceptions with the HTTP status and the OpenAI error type each one maps to, and how their texts show what was sent.

Knows no HTTP framework.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MAX_SHOWN_CHARS = 200


class FdsdError(Exception):
    """Base of every error a user can see.

    Attributes:
        param: the request field or option at fault, or None.
        code: short machine-readable reason, or None.
        retry_after_s: when to try again, for the Retry-After header; None = not known.
    """

    status = 500
    type = "internal_error"
    retry_after_s: int | None = None

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


class Forbidden(FdsdError):
    """A web page asks that has not been allowed to."""

    status = 403
    type = "permission_error"


class NotFound(FdsdError):
    """Unknown route or model."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(BadRequest):
    """The route exists, for other methods."""

    status = 405


class RequestTimeout(BadRequest):
    """The rest of the request did not come in time."""

    status = 408


class PayloadTooLarge(BadRequest):
    """The body exceeds the configured size."""

    status = 413


class UnsupportedMediaType(BadRequest):
    """The body is encoded in a way that is not decoded here."""

    status = 415


class MisframedRequest(BadRequest):
    """Where the request ends can be read in two ways, so what follows it on the connection may be an attack."""


class HeadersTooLarge(BadRequest):
    """The request line and headers exceed what is read of them."""

    status = 431


class Overloaded(FdsdError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    retry_after_s: int

    def __init__(self, message: str, *, retry_after_s: int = 1, param: str | None = None) -> None:
        super().__init__(message, param=param, code="queue_full")
        self.retry_after_s = retry_after_s


# Code of an InternalError that ended an engine with all its requests.
ENGINE_FAILED = "engine_failed"


class InternalError(FdsdError):
    """Our fault: a broken invariant or a failed computation for this request only."""


class DeviceLost(BaseException):
    """A GPU does nothing more, and what is in its memory is not to be trusted.

    It is no Exception, so that none takes it for a request's fault; the executor raises `error`, which ends the engine.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.error = InternalError(message)


class device_lost_as_error:  # noqa: N801 (read as a verb; no generator, as each step goes through it)
    """Raise a DeviceLost of the body as its `error`: the engine, whose thread the body is in, ends."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, DeviceLost):
            raise error.error from error


class Unavailable(FdsdError):
    """The server is draining or its engine is down."""

    status = 503
    type = "service_unavailable_error"


def paused(what: str) -> Unavailable:
    """Return the refusal of a new request by what an operator has paused."""
    return Unavailable(f"{what} is paused: it takes no new requests until POST /resume", code="paused")


class NoInstance(Unavailable):
    """A router knows no instance that could take the request now."""

    retry_after_s = 1


class InstancesFailed(FdsdError):
    """Some instances of a router have not done what all were asked to do; its text names them."""

    status = 502
    type = "bad_gateway_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="instances_failed")


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
    """Return " (did you mean 'x'?)" for the known name that was probably meant, or ""."""
    near = (other for other in difflib.get_close_matches(name, list(known), n=3) if _is_probably(name, other))
    return next((f" (did you mean '{other}'?)" for other in near), "")


def _is_probably(name: str, known: str) -> bool:
    """Whether `name` is `known` with a slip or two, or without a word; names that only share words are others."""
    num_chars = len(name) + len(known)
    num_other = round((1 - difflib.SequenceMatcher(None, known, name).ratio()) * num_chars)
    return num_other <= max(2, num_chars // 8) or set(name.split("_")) <= set(known.split("_"))


def shown(value: object) -> str:
    """Return a value as an error text repeats it: its repr, with JSON's words for true, false and null, cut.

    Takes no longer for a large value than for a small one, and raises nothing.
    """
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


class _ShortRepr(reprlib.Repr):
    """Looks at no more of a value than fits into a text; reprlib's own sorts all keys and writes out all digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_SHOWN_CHARS
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_int(self, x: int, level: int) -> str:
        num_bits = x.bit_length()
        return repr(x) if num_bits <= _MAX_SHOWN_BITS else f"<an integer of {num_bits} bits>"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:  # noqa: N802 - reprlib looks it up by the type's name
        return "null"

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        if x and level <= 0:
            return "{...}"
        entries = [
            f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(x.items(), self.maxdict)
        ]
        return f"{{{', '.join([*entries, *['...'] * (len(x) > self.maxdict)])}}}"


_MAX_SHOWN_BITS = 512  # 155 digits
_SHORT_REPR = _ShortRepr()
