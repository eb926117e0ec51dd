"""The messages between the first node and the others, as frames of a Protocol.

A node joins with a description of its model. When all have joined, each node starts its ranks. From then on the bytes
of their links travel unchanged, with heartbeats in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastdeploy_sd.wire.protocol import Protocol

# The most bytes that are read from a link at once.
CHUNK_BYTES = 256 << 10
MAX_MESSAGE_BYTES = CHUNK_BYTES + 1024


@dataclass(frozen=True, slots=True)
class Join:
    """A node joins. description: the values that all nodes must share, name -> text."""

    node: int
    description: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The node cannot join."""

    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """All nodes have joined: start the ranks. group: a random text that its ranks name when they connect."""

    group: str


@dataclass(frozen=True, slots=True)
class FirstNodeHeartbeat:
    """A heartbeat of the first node."""


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """A heartbeat of another node: seconds that its ranks have computed, and ranks that a signal has stopped."""

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
    """All nodes end. reason: the error, "" = a normal stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that were written into a rank's link."""

    rank: int
    data: bytes


FromFirst = NodeRefused | Start | FirstNodeHeartbeat | Kill | Disconnect | LinkBytes
FromOther = Join | NodeHeartbeat | Ended | LinkBytes
_PROTOCOL = Protocol(2, FromFirst, FromOther)
encode = _PROTOCOL.encode
decode_from_first: Callable[[bytes], FromFirst] = _PROTOCOL.decoder(FromFirst)
decode_from_other: Callable[[bytes], FromOther] = _PROTOCOL.decoder(FromOther)
