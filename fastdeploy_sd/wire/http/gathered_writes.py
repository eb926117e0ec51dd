"""Gathers what is written to a connection in one turn of the event loop into one write.

The head of an answer, its first token and its end are written one by one. Each would be a system call and a packet, and
would wake a client that has to wait for the rest. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any


class GatheredWrites:
    """A transport whose `write` waits for the end of the turn. All else is the transport's own.

    What comes together is bounded by what one turn writes; from then on the transport's own flow control holds.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the bytes, after those of this turn before them."""
        if data:
            if not self._pieces:
                self._loop.call_soon(self._flush)
            self._pieces.append(data)

    def close(self) -> None:
        """Close when everything written has been sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(b"".join(pieces))
