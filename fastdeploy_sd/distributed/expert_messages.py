"""The messages between commands that share experts, as frames of a Protocol, besides the frames of mirrors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastdeploy_sd.wire.protocol import Protocol


@dataclass(frozen=True, slots=True)
class Greet:
    """A later command connects. description: the values that all must share, name -> text."""

    place: int
    description: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Greet: frames of mirrors may follow in both directions."""


@dataclass(frozen=True, slots=True)
class BridgeRefused:
    """Answer to Greet: the command cannot share experts with this one."""

    reason: str


@dataclass(frozen=True, slots=True)
class BridgeHeartbeat:
    """A heartbeat."""


@dataclass(frozen=True, slots=True)
class Leave:
    """No frame follows; answered by the same."""


BridgeMessage = Greet | Welcome | BridgeRefused | BridgeHeartbeat | Leave
_PROTOCOL = Protocol(1, BridgeMessage)
encode = _PROTOCOL.encode
decode: Callable[[bytes | memoryview], BridgeMessage] = _PROTOCOL.decode
