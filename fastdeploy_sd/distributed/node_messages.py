"""What goes between the first node and the others, as versioned msgpack frames. Knows no socket.

A node joins with a description of what it would compute. It is told when all have; then it starts its ranks. From then
on the bytes of their links travel as they are, beside signs of life in both directions.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass

from fastdeploy_sd.errors import shown
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.packing import pack, unpack

PROTOCOL_VERSION = 1
# What is taken from a link at once.
CHUNK_BYTES = 256 << 10
MAX_MESSAGE_BYTES = CHUNK_BYTES + 1024
_HEAD_BYTES = 2


@dataclass(frozen=True, slots=True)
class Join:
    """A node is there. description: what must be the same on all nodes, name -> text."""

    node: int
    description: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Refused:
    """The node cannot be one of them."""

    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """All nodes have joined: start the ranks. group: a random text that its ranks name when they connect."""

    group: str


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life of the first node."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of another node.

    Attributes:
        cpu_s: what its ranks have computed so far, in seconds.
        stopped: those that a signal has stopped.
    """

    cpu_s: float
    stopped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has ended. how: in words."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Kill:
    """These ranks hang; kill them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Everything ends. reason: the error, "" = it was asked for."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What was written into a rank's link."""

    rank: int
    data: bytes


FromFirst = Refused | Start | Alive | Kill | Disconnect | LinkBytes
FromOther = Join | Beat | Ended | LinkBytes
_TYPES: tuple[type, ...] = (Join, Refused, Start, Alive, Beat, Ended, Kill, Disconnect, LinkBytes)
_TAGS = {cls: tag for tag, cls in enumerate(_TYPES)}


def encode(message: FromFirst | FromOther) -> bytes:
    """Message -> frame."""
    head = bytes((PROTOCOL_VERSION, _TAGS[type(message)]))
    if isinstance(message, LinkBytes):
        return head + bytes((message.rank,)) + message.data
    return head + pack(message)


def decode_from_first(frame: bytes) -> FromFirst:
    """Return what the first node sent.

    Raises:
        ProtocolError: another version, unknown tag or malformed value; the only exception there is.
    """
    return typing.cast(FromFirst, _decode(frame, typing.get_args(FromFirst)))


def decode_from_other(frame: bytes) -> FromOther:
    """Return what another node sent.

    Raises:
        ProtocolError: as decode_from_first.
    """
    return typing.cast(FromOther, _decode(frame, typing.get_args(FromOther)))


def _decode(frame: bytes, allowed: tuple[type, ...]) -> object:
    if len(frame) < _HEAD_BYTES or frame[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"frame: expected version {PROTOCOL_VERSION}, got {frame[:1].hex() or 'an empty frame'}")
    cls = _TYPES[frame[1]] if frame[1] < len(_TYPES) else None
    if cls is None or cls not in allowed:
        raise ProtocolError(f"frame: expected a known message, got tag {shown(frame[1])}")
    if cls is not LinkBytes:
        return unpack(cls, frame[_HEAD_BYTES:])
    if len(frame) == _HEAD_BYTES:
        raise ProtocolError("frame: expected a rank's number, got nothing")
    return LinkBytes(frame[_HEAD_BYTES], frame[_HEAD_BYTES + 1 :])
