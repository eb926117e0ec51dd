"""What instances say to each other through Redis, and how it is signed and read. Knows no Redis.

A frame is a version byte, an HMAC-SHA256 and the msgpack of one message. The signature covers the name of the list or
record as well, so that a frame counts only where it was put. Reading raises ProtocolError and nothing else.

A request at another instance has a lease that both sides keep up. Whoever waits for outputs (the *origin*) asks at
every beat for its requests there (`Orders.waiting`), and the instance answers which of them it does not have. An
instance that hears nothing of an origin for the deployment's `timeout_s` ends its requests; an origin that hears
nothing of an instance, or that a request is not there, has the request go on elsewhere. So a frame may be lost or come
twice at any place, and Redis may lose everything it has.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, TypeVar

from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import shown
from fastdeploy_sd.types import FinishReason, KvDescription, Request, RequestOutput, SpeculationInfo
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.packing import pack, unpack

T = TypeVar("T")

VERSION = 3
_VERSION_BYTE = bytes([VERSION])
_SIGNATURE_BYTES = hashlib.sha256().digest_size
_START = 1 + _SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Record:
    """What an instance says of itself at each heartbeat.

    Attributes:
        server: its server, whose HTTP processes know it under that name.
        sent_at: seconds, by Redis's clock.
        load_at: when the engine was asked for its load, by the same clock.
        role: mixed, prefill or decode.
        serves: a digest of everything that a request's tokens depend on.
        speculation: what requests may ask of drafting.
        max_request_tokens: of a request, prompt and output together.
        kv_address: where it takes orders to compute KV, "" = it does not.
        kv: what its KV is like; None = it neither computes KV for others nor takes any.
        num_running, num_waiting, max_num_seqs, max_num_queued: requests it has, and those that it may have.
    """

    instance: str
    server: str
    sent_at: float
    load_at: float
    role: str
    serves: str
    speculation: SpeculationInfo
    max_request_tokens: int
    kv_address: str
    kv: KvDescription | None
    num_running: int
    num_waiting: int
    max_num_seqs: int
    max_num_queued: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_queued < 1 or min(self.num_running, self.num_waiting) < 0:
            raise ValueError("expected counts that are not negative, and room for a request")


@dataclass(frozen=True, slots=True)
class Submission:
    """Run this request; its handle is never used again by its origin."""

    handle: int
    request: Request


@dataclass(frozen=True, slots=True)
class Ending:
    """End this request with that reason; an unknown handle is ignored."""

    handle: int
    reason: FinishReason

    def __post_init__(self) -> None:
        if self.reason not in (FinishReason.ABORT, FinishReason.STOP):
            raise ValueError(f"expected the reason abort or stop, got {self.reason}")


@dataclass(frozen=True, slots=True)
class Orders:
    """From an origin to an instance.

    Attributes:
        origin: where the answers go.
        beat: number of the origin's beat, with which `waiting` is a question; 0 = it is none.
        waiting: all requests the origin waits for at this instance, of those up to handle `newest`.
    """

    origin: str
    submissions: tuple[Submission, ...] = ()
    endings: tuple[Ending, ...] = ()
    beat: int = 0
    waiting: tuple[int, ...] = ()
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """An output of a request.

    Attributes:
        position: tokens of this request that were in outputs before this one, under the same handle.
    """

    handle: int
    position: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Failure:
    """The request was not taken, or ended with an error."""

    handle: int
    error: WireError


@dataclass(frozen=True, slots=True)
class Answers:
    """From an instance to an origin.

    Attributes:
        beat: the question that is answered; 0 = none.
        unknown: of the requests that the origin asked for, those that are not here.
    """

    instance: str
    items: tuple[Item, ...] = ()
    failures: tuple[Failure, ...] = ()
    beat: int = 0
    unknown: tuple[int, ...] = ()


CLUSTER = "cluster"


def requests_of(instance: str) -> str:
    """The list of Orders for an instance."""
    return f"requests.{instance}"


def results_of(origin: str) -> str:
    """The list of Answers for an origin."""
    return f"results.{origin}"


class Sealer:
    """Signs and reads frames.

    Args:
        key: what all instances of a deployment share.
        topic: of the deployment; frames of another one are refused.
        max_bytes: of a frame; a longer one is refused unread.
    """

    def __init__(self, key: bytes, topic: str, max_bytes: int) -> None:
        self._key = key
        self._topic = topic.encode()
        self._max_bytes = max_bytes

    def seal(self, place: str, message: Any) -> bytes:
        """Return the frame of a message for a place.

        Raises:
            ProtocolError: a value has no wire form, or the frame would be too long.
        """
        body = pack(message)
        size = _START + len(body)
        if size > self._max_bytes:
            raise ProtocolError(f"{type(message).__name__}: expected at most {self._max_bytes} bytes, got {size}")
        return _VERSION_BYTE + self._sign(place, body) + body

    def open(self, place: str, cls: type[T], frame: bytes) -> T:
        """Return the message of a frame that was found at a place.

        Raises:
            ProtocolError: it is too long, of another version, not signed for this place, or no such message.
        """
        if len(frame) > self._max_bytes:
            raise ProtocolError(f"{place}: expected a frame of at most {self._max_bytes} bytes, got {len(frame)}")
        if frame[:1] != _VERSION_BYTE:
            raise ProtocolError(f"{place}: expected a frame of version {VERSION}, got {shown(frame[:8])}")
        body = frame[_START:]
        if not hmac.compare_digest(frame[1:_START], self._sign(place, body)):
            raise ProtocolError(f"{place}: expected the signature of this deployment's secret, got another one")
        return unpack(cls, body)

    def _sign(self, place: str, body: bytes) -> bytes:
        message = b"\0".join((_VERSION_BYTE, self._topic, place.encode(), body))
        return hmac.digest(self._key, message, hashlib.sha256)
