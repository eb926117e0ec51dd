"""What a connector counts, for metrics. Written by one thread, read by others as a snapshot."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace


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


@dataclass(slots=True)
class Counters:
    """Totals since the start. Bytes are of pages; seconds run from order to arrival, of transfers that arrived."""

    num_fetched: int = 0
    num_cancelled: int = 0
    num_failed: Counter[Failure] = field(default_factory=Counter)
    num_refused: Counter[Refusal] = field(default_factory=Counter)
    received_bytes: int = 0
    fetch_seconds: float = 0.0
    num_sent: int = 0
    num_unsent: int = 0  # given up on either side
    sent_bytes: int = 0

    def snapshot(self) -> Counters:
        """Return a copy."""
        return replace(self, num_failed=Counter(self.num_failed), num_refused=Counter(self.num_refused))
