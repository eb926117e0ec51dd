"""What an instance tells a router about itself, as signed frames. Knows no socket.

The conversation: GET /challenge -> a word; POST /register with a Registration that names it -> a session; then POST
/heartbeat about every second, and POST /deregister at the end, with a Heartbeat of a higher number each time. A router
that does not know the session answers 404: it was started anew, and the instance registers again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Self

from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.wire.protocol import Protocol, SignedCodec

REGISTER, HEARTBEAT, DEREGISTER, CHALLENGE = "/register", "/heartbeat", "/deregister", "/challenge"
HEARTBEAT_S = 1.0
MAX_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Clock:
    """The clocks of an instance: `monotonic` judges the age of routes, `wall` (since the epoch) is for logs only."""

    monotonic: float
    wall: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.monotonic) and math.isfinite(self.wall)):
            raise ValueError(f"clock: expected finite numbers, got {self.monotonic} and {self.wall}")

    @classmethod
    def now(cls) -> Self:
        return cls(time.monotonic(), time.time())


@dataclass(frozen=True, slots=True)
class Registration:
    """An instance; its host, and that of its kv_address, may be "" = where the router sees it."""

    challenge: str
    member: Member
    host: str
    port: int
    served_names: tuple[str, ...]
    created: int
    load: InstanceLoad
    clock: Clock


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, or the last one of a session; `number`: higher in each message of a session."""

    session: str
    number: int
    load: InstanceLoad
    clock: Clock


PROTOCOL = Protocol(4, Registration, Heartbeat)


def codec_for(key: bytes) -> SignedCodec:
    """Return what signs and reads the messages to a router; each counts at its path only."""
    return SignedCodec(PROTOCOL, key, "router", MAX_MESSAGE_BYTES)
