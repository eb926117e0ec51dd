"""What an instance tells a router about itself: signed msgpack of dataclasses. Knows no socket.

The conversation: GET /challenge -> a word; POST /register with a Registration that names it -> a session; then POST
/heartbeat about every second, and POST /deregister at the end, with a Heartbeat of a higher number each time. A router
that does not know the session answers 404: it was started anew, and the instance registers again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Self

from fastdeploy_sd.types import KvDescription

PROTOCOL_VERSION = 2
REGISTER, HEARTBEAT, DEREGISTER, CHALLENGE = "/register", "/heartbeat", "/deregister", "/challenge"
HEARTBEAT_S = 1.0
MAX_MESSAGE_BYTES = 1 << 16

MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"
ROLES = (MIXED, PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class Clock:
    """The clocks of an instance when it wrote a message, in seconds.

    Attributes:
        monotonic: by which it judges the age of routes; all its processes share it, and nobody sets it.
        wall: since the epoch, for logs only.
    """

    monotonic: float
    wall: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.monotonic) and math.isfinite(self.wall)):
            raise ValueError(f"clock: expected finite numbers, got {self.monotonic} and {self.wall}")

    @classmethod
    def now(cls) -> Self:
        """Return the clocks of this machine."""
        return cls(time.monotonic(), time.time())


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """How busy an instance is.

    Attributes:
        takes_requests: False while it drains or its engine is silent.
        max_num_seqs: requests that it runs side by side.
        num_blocks, num_available_blocks: KV blocks in all / without content or with content that nobody uses.
    """

    takes_requests: bool = True
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    num_blocks: int = 0
    num_available_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """An instance.

    Attributes:
        version: PROTOCOL_VERSION of who wrote it.
        challenge: of the router.
        instance_id: of this start of the instance; another start has another one.
        role: one of ROLES.
        host: where its API listens; "" = where the router sees it.
        kv_address: where it takes orders to compute KV, "tcp://host:port", host "" as above; "" = nowhere.
        kv: what its KV is like; None = it neither computes KV for others nor takes any.
        served_names: of the model; the first stands for an unnamed one.
        max_model_len: longest request, in tokens.
        created: when its model was loaded, in seconds since the epoch.
        fingerprint: instances with equal ones give the same bytes for the same request.
    """

    version: int
    challenge: str
    instance_id: str
    role: str
    host: str
    port: int
    kv_address: str
    kv: KvDescription | None
    served_names: tuple[str, ...]
    max_model_len: int
    created: int
    fingerprint: str
    load: InstanceLoad
    clock: Clock


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, or the last one of a session.

    Attributes:
        number: higher in each message of a session.
    """

    session: str
    number: int
    load: InstanceLoad
    clock: Clock
