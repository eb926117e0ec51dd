"""What the HTTP processes and the engine process say to each other, as versioned msgpack frames.

A frame is one version byte and the msgpack list `[tag, fields...]`. Decoding is strict and raises nothing but
ProtocolError, whatever the bytes are. Knows no socket.

The conversation, per client: Hello -> Ready once; then any number of Submit, each answered by exactly one Rejected or
by Outputs of which exactly one carries a finish_reason; Abort asks for that last output early. Bye ends it. A client
numbers its submissions with handles of its own: what is on its way for an aborted request can then not be mistaken for
a later request that has the same request id. EngineDead, too, is answered with Bye.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from fastdeploy_sd.errors import ERROR_TYPES, BadRequest, FdsdError, InternalError, Overloaded, shown
from fastdeploy_sd.rules.requests import RequestRules
from fastdeploy_sd.types import FinishReason, ModelInfo, Request, RequestOutput
from fastdeploy_sd.types.stats import EngineStats
from fastdeploy_sd.wire.codec import Codec, ProtocolError, codec_of

PROTOCOL_VERSION = 5
_MAX_PID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class WireError:
    """An FdsdError as a value.

    Attributes:
        kind: a key of `errors.ERROR_TYPES`.
        retry_after_s: only for Overloaded.
    """

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: FdsdError) -> WireError:
        """Describe an error; a subclass without a name of its own on the wire travels as its nearest base."""
        kind = next((c.__name__ for c in type(error).__mro__ if c.__name__ in ERROR_TYPES), InternalError.__name__)
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        return cls(kind, error.message, error.param, error.code, retry_after_s)

    def to_exception(self) -> FdsdError:
        """Rebuild the error; an unknown kind becomes an InternalError that keeps the text."""
        if self.kind == Overloaded.__name__:
            return Overloaded(self.message, retry_after_s=self.retry_after_s or 1, param=self.param)
        return ERROR_TYPES.get(self.kind, InternalError)(self.message, param=self.param, code=self.code)


# ---- client -> engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a client. The engine aborts the client's requests when process `pid` ends."""

    pid: int

    def __post_init__(self) -> None:
        if not 0 < self.pid <= _MAX_PID:
            raise ValueError(f"expected a process id in 1..{_MAX_PID}, got {self.pid}")


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this request; everything about it goes by the handle, which the client never uses again."""

    handle: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Finish these submissions now; unknown handles are ignored (the request may have ended meanwhile).

    Attributes:
        reason: what their last outputs say and the statistics count: ABORT, or STOP when a stop string, of which the
            engine knows nothing, has completed their text.
    """

    handles: tuple[int, ...]
    reason: FinishReason = FinishReason.ABORT

    def __post_init__(self) -> None:
        if self.reason not in (FinishReason.ABORT, FinishReason.STOP):
            raise ValueError(f"expected the reason abort or stop, got {self.reason}")


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Ask for a StatsReply with the same serial."""

    serial: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The client closes; its remaining requests are aborted and nothing more is sent to it."""


# ---- engine -> client -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """Answer to Hello."""

    model_info: ModelInfo


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything one step produced for this client: output i belongs to submission handles[i]."""

    handles: tuple[int, ...]
    outputs: tuple[RequestOutput, ...]

    def __post_init__(self) -> None:
        if len(self.handles) != len(self.outputs):
            raise ValueError(f"expected a handle per output, got {len(self.handles)} for {len(self.outputs)}")


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was not taken."""

    handle: int
    error: WireError


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The engine's statistics between two steps."""

    serial: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Drain:
    """The engine finishes what it has and takes nothing new."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A frame of the client could not be read or understood; which request it was about is unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineDead:
    """The engine's last message: everything sent before it counts. The client answers Bye, for which it waits a bit.

    Attributes:
        has_failed: what was not answered is an internal error; else it came too late.
    """

    reason: str
    has_failed: bool


Message = (
    Hello | Submit | Abort | StatsRequest | Bye | Ready | Outputs | Rejected | StatsReply | Drain | Fault | EngineDead
)

# Tags are part of the protocol: append, never renumber; any other change raises PROTOCOL_VERSION.
_TYPE_OF_TAG: dict[int, Any] = {
    1: Hello,
    2: Submit,
    3: Abort,
    4: StatsRequest,
    5: Bye,
    16: Ready,
    17: Outputs,
    18: Rejected,
    19: StatsReply,
    20: Drain,
    21: Fault,
    22: EngineDead,
}
_TAG_OF_TYPE = {cls: tag for tag, cls in _TYPE_OF_TAG.items()}
_CODEC: dict[Any, Codec] = {cls: codec_of(cls) for cls in _TAG_OF_TYPE}
_VERSION_BYTE = bytes([PROTOCOL_VERSION])
# Version, a list of tag, handle and request, the tag; see `encode`.
_SUBMIT_START = _VERSION_BYTE + bytes([0x93, _TAG_OF_TYPE[Submit]])
_MAX_INT_BYTES = 9


def encode(message: Message, receiver: ModelInfo | None = None) -> bytes:
    """Message -> frame.

    Args:
        receiver: of the engine that it is for; None = there is no limit.

    Raises:
        BadRequest: the engine would not take so long a frame.
        ProtocolError: a value has no wire form (an integer beyond 64 bits, a NumPy scalar in place of an int).
    """
    try:
        values = _CODEC[type(message)].encode(message)  # type: ignore[misc]  # dataclass codecs always encode
        body: bytes = msgpack.packb([_TAG_OF_TYPE[type(message)], *values])
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{type(message).__name__}: cannot be sent: {error}") from None
    if receiver is not None and len(body) >= max_frame_bytes(receiver):
        raise BadRequest(f"request: expected at most what its limits allow, got {len(body)} bytes")
    return _VERSION_BYTE + body


def max_frame_bytes(info: ModelInfo) -> int:
    """Bytes of the longest frame that a client may send: that of a Submit whose request is at every limit."""
    return RequestRules(info.vocab_size, info.max_model_len).max_request_bytes


def handle_of_submit(frame: bytes) -> int | None:
    """Return the handle of a Submit without reading its request; None for any other frame, also one that is broken."""
    if frame[: len(_SUBMIT_START)] != _SUBMIT_START:
        return None
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame[len(_SUBMIT_START) : len(_SUBMIT_START) + _MAX_INT_BYTES])
    try:
        handle = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return handle if type(handle) is int else None


def decode(frame: bytes) -> Message:
    """Frame -> message.

    Raises:
        ProtocolError: another version, an unknown tag, a malformed or surplus value; the only exception there is.
    """
    if frame[:1] != _VERSION_BYTE:
        raise ProtocolError(f"frame: expected version {PROTOCOL_VERSION}, got {frame[:1].hex() or 'an empty frame'}")
    try:
        values = msgpack.unpackb(memoryview(frame)[1:], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame: not msgpack: {error}") from None
    tag = values[0] if isinstance(values, list) and values else None
    cls = _TYPE_OF_TAG.get(tag) if type(tag) is int else None
    if cls is None:
        raise ProtocolError(f"frame: expected a list that starts with a known message tag, got {shown(values)}")
    message: Message = _CODEC[cls].decode(values[1:])
    return message
