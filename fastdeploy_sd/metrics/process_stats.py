"""Counters of a server's processes other than the engine, summed over all of them by any.

With several processes any of them may be asked for the counts of all. So each keeps its own in a file of the server's
private directory, up to date within about a second, and adds the others' when it is asked. A process
that replaces a dead one goes on from its counts, so that no counter ever falls.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from fastdeploy_sd.metrics.http_stats import HttpStats
from fastdeploy_sd.metrics.redis_stats import RedisStats

_FILE = "counts-{}.json"
_PUBLISH_S = 1.0


@dataclass(slots=True)
class ProcessStats:
    """Counters of a process."""

    http: HttpStats = field(default_factory=HttpStats)
    redis: RedisStats = field(default_factory=RedisStats)

    def to_json(self) -> str:
        """Return everything as JSON text."""
        return json.dumps([self.http.to_json(), {f.name: getattr(self.redis, f.name) for f in fields(self.redis)}])

    @staticmethod
    def from_json(text: str) -> ProcessStats:
        """Return what `to_json` wrote."""
        http, redis = json.loads(text)
        return ProcessStats(
            HttpStats.from_json(http), RedisStats(**{name: Counter(counts) for name, counts in redis.items()})
        )

    def add(self, other: ProcessStats) -> None:
        """Add another process's counts."""
        self.http.add(other.http)
        self.redis.add(other.redis)


class SharedStats:
    """The counts of one process among several.

    Attributes:
        own: this process's counts, its predecessors' included.

    Args:
        folder: of the server; one file per process. None = this one is the only one.
        name: of this process among them, the same for its successors.
    """

    def __init__(self, folder: Path | None = None, name: str = "") -> None:
        self._folder = folder
        self._path = None if folder is None else folder / _FILE.format(name)
        self.own = ProcessStats()
        if self._path is not None and self._path.exists():
            self.own = ProcessStats.from_json(self._path.read_text(encoding="utf-8"))
            self.own.http.num_open = 0

    def publish(self) -> None:
        """Let the others know the counts of now."""
        if self._path is not None:
            unfinished = self._path.with_suffix(".new")
            unfinished.write_text(self.own.to_json(), encoding="utf-8")
            os.replace(unfinished, self._path)

    async def keep_published(self) -> None:
        """Publish every second, until cancelled."""
        while True:
            self.publish()
            await asyncio.sleep(_PUBLISH_S)

    def total(self) -> ProcessStats:
        """Return the sums over all processes."""
        others = [] if self._folder is None else [p for p in self._folder.glob(_FILE.format("*")) if p != self._path]
        total = ProcessStats()
        for part in (self.own, *(ProcessStats.from_json(p.read_text(encoding="utf-8")) for p in others)):
            total.add(part)
        return total
