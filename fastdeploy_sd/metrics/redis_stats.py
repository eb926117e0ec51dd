"""Counters of the requests that instances share through Redis. Knows no Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fastdeploy_sd.metrics.by_labels import by_labels


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


class RedisCollector(Collector):
    """Presents what a server's processes count; without samples where no Redis is used."""

    def __init__(self, stats: RedisStats) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, text, label, counts in (
            (
                "requests",
                "Requests by where they were placed, of clients of this server: kept (run here), pushed (to another "
                "instance); and of others: taken. One that goes on elsewhere is placed again.",
                "place",
                self._stats.requests,
            ),
            ("moves", "Requests that left an instance before their end, by why.", "reason", self._stats.moves),
            ("round_trips", "Round trips to Redis, by what for.", "purpose", self._stats.round_trips),
            (
                "errors",
                "What failed with Redis, by kind: timeout, connection, refused (it answers with an error), answer (it "
                "is no Redis), unreadable (messages that are not of this deployment).",
                "kind",
                self._stats.errors,
            ),
            ("bytes", "Bytes of messages that were pushed and taken.", "direction", self._stats.num_bytes),
        ):
            yield by_labels(
                f"fastdeploy_sd:redis_{name}", text, [label], {(value,): count for value, count in counts.items()}
            )
