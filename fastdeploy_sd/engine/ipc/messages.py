"""What the HTTP processes and the engine process say to each other, as frames of a Protocol. Knows no socket.

The conversation, per client: ClientHello -> EngineReady once; then any number of Submit, each answered by exactly one
Rejected or by Outputs of which exactly one carries a finish_reason. Abort asks for that last output early.
ClientDisconnect ends the conversation and also answers EngineDead. A client numbers its submissions with handles of its
own, so that late outputs of an aborted request cannot be mistaken for those of a later request with the same id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy_sd.errors import ERROR_TYPES, BadRequest, FdsdError, InternalError, Overloaded
from fastdeploy_sd.rules.requests import RequestRules
from fastdeploy_sd.types import AdapterSource, FinishReason, ModelInfo, Request, RequestOutput
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.types.stats import EngineStats
from fastdeploy_sd.wire.protocol import Protocol

_MAX_PID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class WireError:
    """An FdsdError as a value; `kind` is a key of `errors.ERROR_TYPES`."""

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


@dataclass(frozen=True, slots=True)
class ClientHello:
    """First message of a client. The engine aborts the client's requests when process `pid` ends."""

    pid: int

    def __post_init__(self) -> None:
        _verify_pid(self.pid)


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this request; everything about it goes by the handle, which the client never uses again."""

    handle: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Finish these submissions now; unknown handles are ignored. STOP: a stop string has completed their text."""

    handles: tuple[int, ...]
    reason: FinishReason = FinishReason.ABORT

    def __post_init__(self) -> None:
        if self.reason not in (FinishReason.ABORT, FinishReason.STOP):
            raise ValueError(f"expected the reason abort or stop, got {self.reason}")


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Ask for a StatsReply with the same serial. `pauses`: begin a pause, or end it; None = neither."""

    serial: int
    pauses: bool | None = None


@dataclass(frozen=True, slots=True)
class ExpertsRequest:
    """Ask for an ExpertsReply with the same handle, or Rejected. rearranges, clears: see SpreadExperts."""

    handle: int
    rearranges: bool = False
    clears: bool = False


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """Ask for an adapter to be loaded from a folder, or unloaded if that is None: AdapterReply, or Rejected."""

    handle: int
    name: str
    folder: str | None


@dataclass(frozen=True, slots=True)
class ClientDisconnect:
    """The client closes; its remaining requests are aborted and nothing more is sent to it."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Answer to ClientHello, and to each further one. `pid`: of the engine's process."""

    model_info: ModelInfo
    pid: int

    def __post_init__(self) -> None:
        _verify_pid(self.pid)


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
    """The request, or the one about experts or an adapter, was not taken."""

    handle: int
    error: WireError


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The engine's statistics between two steps."""

    serial: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class ExpertsReply:
    """Where experts are between two steps."""

    handle: int
    report: ExpertReport


@dataclass(frozen=True, slots=True)
class AdapterReply:
    """The adapter was loaded, or unloaded."""

    handle: int
    source: AdapterSource


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    """To every client: the adapters that requests may name from now on; see ModelInfo."""

    adapters: tuple[AdapterSource, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """Whether the engine finishes what it has and takes nothing new, and whether clients shall send nothing new.

    During a pause it takes what is sent nevertheless: a part of what had begun.
    """

    is_draining: bool
    is_paused: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """A frame of the client could not be read or understood; which request it was about is unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineDead:
    """The engine's last message; with `has_failed` what was not answered is an internal error, else it is too late."""

    reason: str
    has_failed: bool


FromClient = ClientHello | Submit | Abort | StatsRequest | ClientDisconnect | ExpertsRequest | AdapterRequest
FromEngine = (
    EngineReady
    | Outputs
    | Rejected
    | StatsReply
    | Notice
    | Fault
    | EngineDead
    | ExpertsReply
    | AdapterReply
    | AdaptersChanged
)
Message = FromClient | FromEngine
_PROTOCOL = Protocol(15, FromClient, FromEngine)
decode: Callable[[bytes], Message] = _PROTOCOL.decode


def _verify_pid(pid: int) -> None:
    if not 0 < pid <= _MAX_PID:
        raise ValueError(f"expected a process id in 1..{_MAX_PID}, got {pid}")


def encode(message: Message, receiver: ModelInfo | None = None) -> bytes:
    """Message -> frame; raises BadRequest where the receiving engine would not take so long a frame."""
    frame = _PROTOCOL.encode(message)
    if receiver is not None and len(frame) > max_frame_bytes(receiver):
        raise BadRequest(f"request: expected at most what its limits allow, got {len(frame)} bytes")
    return frame


def max_frame_bytes(info: ModelInfo) -> int:
    """Bytes of the longest frame that a client may send: that of a Submit whose request is at every limit."""
    return RequestRules(info.vocab_size, info.max_model_len).max_request_bytes


def handle_of_submit(frame: bytes) -> int | None:
    """Return the handle of a Submit without reading its request; None for any other frame, also one that is broken."""
    return _PROTOCOL.first_integer(frame, Submit)
