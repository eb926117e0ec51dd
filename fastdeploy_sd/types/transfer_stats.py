"""What an instance that exchanges KV with others counts. Plain numbers that cross a process border."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class WayStats:
    """What went in one direction by one protocol.

    Attributes:
        num_pages, num_bytes: a page is a block in a layer; sent, or arrived whole and written.
        num_transfers: transfers that ended with all their pages. seconds: of these, from the order to the end; the
            prompt was computed meanwhile.
    """

    num_pages: int = 0
    num_bytes: int = 0
    num_transfers: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Totals since the engine started. An instance that exchanges no KV has none.

    Attributes:
        received, sent: protocol -> what went that way.
        num_unsent: transfers from here that were given up, on either side.
        num_refused: why -> pages that were not written, and messages that were not obeyed.
    """

    received: dict[str, WayStats] = field(default_factory=dict)
    sent: dict[str, WayStats] = field(default_factory=dict)
    num_unsent: int = 0
    num_refused: dict[str, int] = field(default_factory=dict)
