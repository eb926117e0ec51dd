"""What a connector counts, for metrics. Written by one thread, read by others as a snapshot."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace

from fastdeploy_sd.config import PROTOCOLS
from fastdeploy_sd.types.stats import TransferStats, WayStats


class Refusal(enum.StrEnum):
    """Why a chunk was not written to a page, or a frame not obeyed."""

    MALFORMED = "malformed"  # no message of this protocol
    UNEXPECTED = "unexpected"  # not now, or not from this instance
    UNKNOWN_TRANSFER = "unknown_transfer"  # cancelled, expired, ended, or never ordered
    OUT_OF_BOUNDS = "out_of_bounds"  # a layer, block or slot that was not ordered or offered
    DUPLICATE = "duplicate"
    WRONG_SIZE = "wrong_size"
    DAMAGED = "damaged"  # other bytes than were sent


class Failure(enum.StrEnum):
    """Why a decode instance did not get what it ordered."""

    REFUSED = "refused"  # the instances do not fit
    UNREACHABLE = "unreachable"  # no connection, or another secret
    LOST = "lost"  # the connection, or all signs of life
    DEADLINE = "deadline"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"
    FAILED = "failed"  # the prefill instance gave up


def _ways() -> dict[str, WayStats]:
    return {protocol: WayStats() for protocol in (*PROTOCOLS, "cuda")}  # see TransferContext.protocols


@dataclass(slots=True)
class Counters:
    """Totals since the start, written by the connector's thread and read by others at any time."""

    received: dict[str, WayStats] = field(default_factory=_ways)
    sent: dict[str, WayStats] = field(default_factory=_ways)
    num_unsent: int = 0
    num_refused: Counter[Refusal] = field(default_factory=Counter)

    def stats(self) -> TransferStats:
        return TransferStats(
            {protocol: replace(way) for protocol, way in self.received.items()},
            {protocol: replace(way) for protocol, way in self.sent.items()},
            self.num_unsent,
            {refusal.value: self.num_refused[refusal] for refusal in Refusal},
        )
