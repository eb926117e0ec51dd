"""What an HTTP process counts itself: connections, and how requests were answered. Knows no HTTP library."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HttpStats:
    """Counters of one HTTP process since it started, and one gauge.

    Attributes:
        num_open: connections that are open now.
        num_accepted: connections that were served.
        refused: reason -> connections that were not served: "limit" and "address_limit" of those that were answered
            503, "system" of attempts to accept one without a descriptor left; it waits.
        closed: reason -> connections that were closed before they had sent a complete request: "headers_timeout",
            "body_timeout", "malformed", "surplus_body" (sent behind its answer), "room" (another one needed its place).
        requests: (route, status, error code or type, "" = none) -> requests; 499 = the client left before its answer.
    """

    num_open: int = 0
    num_accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
