"""Counters of the requests that instances share through Redis. Knows no Redis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class RedisStats:
    """Counters of one process since it started.

    Attributes:
        requests: where -> requests: "kept" for the own engine and "pushed" to another instance, by the process that the
            client talks to, again when they go on elsewhere; "taken" from others, by the instance that runs them.
        moves: error code -> requests that left an instance before their end.
        round_trips: what for -> round trips to Redis.
        errors: kind -> what failed: "timeout", "connection", "refused" (Redis answers with an error), "answer" (it is
            no Redis), "unreadable" (messages that are not this deployment's).
        num_bytes: direction -> bytes of messages: "pushed" and "taken".
    """

    requests: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    round_trips: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: RedisStats) -> None:
        """Add another process's counts."""
        for each in fields(self):
            getattr(self, each.name).update(getattr(other, each.name))
