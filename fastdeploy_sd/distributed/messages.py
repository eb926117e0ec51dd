"""The messages between rank 0 and the other ranks, as a Protocol.

A frame to a rank is a list of orders; a frame from a rank holds one reply.

    ranks have a GPU each          Contribution -> AllGathered, and again where rank 0 reaches the KV of all ranks
    the model is loaded            Loaded -> Measure -> Measurement -> AllReducedMin -> RankReady
    the size of KV is configured   Loaded -> RankReady
    an attempt                     AttemptDone

Instead of any reply, RankFailed says that the rank ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.wire.codec import pack, unpack
from fastdeploy_sd.wire.protocol import Protocol
from fastdeploy_sd.worker.ranks.commands import Command, RankFailure

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
class StopRank:
    """End, after having served experts for so long as other engines need them, at most leave_s."""

    leave_s: float = 0.0


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
class RankReady:
    """Everything is loaded."""


@dataclass(frozen=True, slots=True)
class AttemptDone:
    """An attempt has ended. failure: None = it has succeeded."""

    failure: RankFailure | None = None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank ends."""

    error: WireError


Order = Command | AllGathered | Measure | AllReducedMin | StopRank
Reply = Contribution | Loaded | Measurement | RankReady | AttemptDone | RankFailed

_PROTOCOL = Protocol(4, Order, Reply)
encode = _PROTOCOL.encode


@dataclass(frozen=True, slots=True)
class _Frame:
    messages: tuple[bytes, ...]


def frame_of(messages: Sequence[bytes]) -> bytes:
    """Return the frame of encoded messages."""
    return pack(_Frame(tuple(messages)))


def decode(frame: bytes) -> list[Order | Reply]:
    """Return the messages of a frame; raises ProtocolError where it holds something else."""
    return [_PROTOCOL.decode(message) for message in unpack(_Frame, frame).messages]
