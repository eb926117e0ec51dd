"""What goes over the sockets between rank 0 and the other ranks, as msgpack frames. Knows no socket.

A frame to a rank is a list of orders, each a list of its tag and its fields; a frame from a rank holds one reply.

    ranks have a GPU each          Contribution -> AllGathered, and again where rank 0 reaches the KV of all ranks
    the model is loaded            Loaded -> Measure -> Measurement -> AllReducedMin -> Ready
    the size of KV is configured   Loaded -> Ready
    an attempt                     Done

In place of any reply Failed says that the rank ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]

from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import shown
from fastdeploy_sd.wire.codec import Codec, ProtocolError, codec_of
from fastdeploy_sd.worker.ranks.commands import (
    BeginDrafts,
    Command,
    DraftOutcome,
    DraftRows,
    ForgetDrafts,
    RunRows,
    TakeOutput,
    TakePlan,
)

# ---- from rank 0 ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllGathered:
    """The contributions of all ranks, in their order."""

    data: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """All ranks have loaded: measure now."""


@dataclass(frozen=True, slots=True)
class AllReducedMin:
    """The smallest of the measurements."""

    value: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


# ---- from the others ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contribution:
    """The bytes that a rank gives to all ranks while it loads."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """The weights are in memory."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Answer to Measure."""

    value: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything is loaded."""


@dataclass(frozen=True, slots=True)
class Done:
    """An attempt has ended.

    Attributes:
        failure: why it failed; "" = it did not.
    """

    failure: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends."""

    error: WireError


Order = Command | AllGathered | Measure | AllReducedMin | Stop
Reply = Contribution | Loaded | Measurement | Ready | Done | Failed

_TYPE_OF_TAG: dict[int, Any] = dict(
    enumerate(
        (
            TakePlan,
            RunRows,
            TakeOutput,
            BeginDrafts,
            ForgetDrafts,
            DraftRows,
            DraftOutcome,
            Measure,
            AllReducedMin,
            Stop,
            Loaded,
            Measurement,
            Ready,
            Done,
            Failed,
            AllGathered,
            Contribution,
        )
    )
)
_TAG_OF_TYPE = {cls: tag for tag, cls in _TYPE_OF_TAG.items()}
_CODEC: dict[Any, Codec] = {cls: codec_of(cls) for cls in _TAG_OF_TYPE}


def encode(message: Order | Reply) -> bytes:
    """Message -> a part of a frame.

    Raises:
        ProtocolError: a value has no wire form, as an array of two dimensions.
    """
    try:
        values = _CODEC[type(message)].encode(message)  # type: ignore[misc]  # dataclass codecs always encode
        return cast(bytes, msgpack.packb([_TAG_OF_TYPE[type(message)], *values]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{type(message).__name__}: cannot be sent: {error}") from None


def frame_of(parts: Sequence[bytes]) -> bytes:
    """Return the frame of encoded messages."""
    return b"".join((msgpack.Packer().pack_array_header(len(parts)), *parts))


def decode(frame: bytes) -> list[Order | Reply]:
    """Frame -> its messages.

    Raises:
        ProtocolError: the frame holds something else.
    """
    try:
        parts: Any = msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame: not msgpack: {error}") from None
    if not isinstance(parts, list):
        raise ProtocolError(f"frame: expected a list of messages, got {shown(parts)}")
    return [_decode_part(part) for part in parts]


def _decode_part(values: Any) -> Order | Reply:
    tag = values[0] if isinstance(values, list) and values else None
    cls = _TYPE_OF_TAG.get(tag) if type(tag) is int else None
    if cls is None:
        raise ProtocolError(f"frame: expected lists that start with a known tag, got {shown(values)}")
    message: Order | Reply = _CODEC[cls].decode(values[1:])
    return message
