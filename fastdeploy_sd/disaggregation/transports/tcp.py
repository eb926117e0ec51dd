"""Pages as frames after the message, encrypted and authenticated as the connection is. Slots are only counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.disaggregation.transfer.messages import Receiver
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, Pages
from fastdeploy_sd.disaggregation.transports.transport import Batch, PlacedAtOnce, gather


class TcpSender(PlacedAtOnce):
    """Copies each page into a frame of its own."""

    def start(self, batch: Batch, pages: Pages, block_ids: Sequence[int]) -> None:
        checksums = []
        for pieces in pages.read_all(batch.layer, block_ids):
            frame = bytearray(sum(piece.nbytes for piece in pieces))
            checksums.append(gather(pieces, np.frombuffer(frame, np.uint8))[1])
            batch.payloads.append(frame)
        batch.checksums = tuple(checksums)
        self._finished.append(batch)

    def close(self) -> None:
        """Nothing is held."""


class TcpReceiver:
    """Takes each page from the frame it came in."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.offer = Receiver(num_slots, slot_bytes)

    def page(self, slot: int, num_bytes: int, payload: Bytes | None) -> Bytes | None:
        """See ReceiverEnd; `num_bytes` is what the page should have."""
        return payload if 0 <= slot < self.offer.num_slots else None

    def settle(self) -> None:
        """See ReceiverEnd: they are copied."""

    def close(self) -> None:
        """Nothing is held."""
