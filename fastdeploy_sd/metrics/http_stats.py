"""Counters of an HTTP process: connections, and answers by status. Knows no HTTP library."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HttpStats:
    """Counters of one HTTP process since it started, and one gauge.

    Attributes:
        num_open: connections that are open now.
        num_accepted: connections that were served.
        refused: reason -> connections that were not served: "limit" and "address_limit" of those that were answered
            503, "system" of those that wait because no descriptor is left to accept them.
        closed: reason -> connections that were closed before they had sent a complete request: "headers_timeout",
            "body_timeout", "malformed", "surplus_body" (more than is read), "room" (another one needed its place).
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

    def add(self, other: HttpStats) -> None:
        """Add another process's counts."""
        self.num_open += other.num_open
        self.num_accepted += other.num_accepted
        self.refused.update(other.refused)
        self.closed.update(other.closed)
        self.requests.update(other.requests)
