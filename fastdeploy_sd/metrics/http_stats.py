"""What HTTP processes count themselves: connections, and how requests were answered. Knows no HTTP library.

With several processes any of them may be asked for the counts of all. So each keeps its own in a file of the server's
private directory, up to date within about a second, and adds the others' when it is asked. A process
that replaces a dead one goes on from its counts, so that no counter ever falls.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_FILE = "http-{}.json"


@dataclass(slots=True)
class HttpStats:
    """Counters of one HTTP process since it started, and one gauge.

    Attributes:
        num_open: connections that are open now.
        num_accepted: connections that were served.
        refused: reason -> connections that were not served: "limit" and "address_limit" of those that were answered
            503, "system" of those that wait because no descriptor is left to accept them.
        closed: reason -> connections that were closed before they had sent a complete request: "headers_timeout",
            "body_timeout", "malformed", "surplus_body" (sent behind its answer), "room" (another one needed its place).
        requests: (route, status, error code or type, "" = none) -> requests; 499 = the client left before its answer.
    """

    num_open: int = 0
    num_accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def to_json(self) -> str:
        """Return everything as JSON text."""
        requests = [[*labels, count] for labels, count in self.requests.items()]
        return json.dumps([self.num_open, self.num_accepted, self.refused, self.closed, requests])

    @staticmethod
    def from_json(text: str) -> HttpStats:
        """Return what `to_json` wrote."""
        num_open, num_accepted, refused, closed, requests = json.loads(text)
        by_labels = Counter({(route, status, error): count for route, status, error, count in requests})
        return HttpStats(num_open, num_accepted, Counter(refused), Counter(closed), by_labels)

    @staticmethod
    def total(parts: Iterable[HttpStats]) -> HttpStats:
        """Return the sums."""
        total = HttpStats()
        for part in parts:
            total.num_open += part.num_open
            total.num_accepted += part.num_accepted
            total.refused += part.refused
            total.closed += part.closed
            total.requests += part.requests
        return total


class SharedStats:
    """The counts of one HTTP process among several.

    Attributes:
        own: this process's counts, its predecessors' included.

    Args:
        folder: of the server; one file per process.
        number: of this process among them, the same for its successors. None = it is the only one.
    """

    def __init__(self, folder: Path | None = None, number: int | None = None) -> None:
        self._folder = folder
        self._path = None if folder is None else folder / _FILE.format(number)
        self.own = HttpStats()
        if self._path is not None and self._path.exists():
            self.own = HttpStats.from_json(self._path.read_text(encoding="utf-8"))
            self.own.num_open = 0

    def publish(self) -> None:
        """Let the others know the counts of now."""
        if self._path is not None:
            unfinished = self._path.with_suffix(".new")
            unfinished.write_text(self.own.to_json(), encoding="utf-8")
            os.replace(unfinished, self._path)

    def total(self) -> HttpStats:
        """Return the sums over all processes."""
        others = [] if self._folder is None else [p for p in self._folder.glob(_FILE.format("*")) if p != self._path]
        return HttpStats.total([self.own, *(HttpStats.from_json(p.read_text(encoding="utf-8")) for p in others)])
