"""How pages get from one process to another: one interface, of which each way is a file.

The receiver owns a window of slots and reads them; the sender fills slots it has credit for. A page takes one slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.disaggregation.transfer.messages import Receiver
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, DevicePage, Pages

_MAX_SLOTS = 1024


class TransportError(Exception):
    """A transport cannot be used between these two instances; the text says why."""


@dataclass(slots=True)
class Batch:
    """Pages of one layer on their way, one per slot; the transport fills in checksums and payloads.

    `owner` is for the caller that started it; `error` says why they could not be sent, "" when they were.
    """

    owner: Any
    layer: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    checksums: tuple[int, ...] = ()
    payloads: list[bytearray] = field(default_factory=list)
    error: str = ""


class Sender(Protocol):
    """The prefill instance's end, for one thread; `fd` is readable when `finished` has something, None = at once."""

    fd: int | None

    def start(self, batch: Batch, pages: Pages, block_ids: Sequence[int]) -> None:
        """Copy the pages of these blocks and send them on; they are read no more when this returns."""

    def finished(self) -> list[Batch]:
        """Return the batches that have been placed, or failed, since the last call."""

    def close(self) -> None:
        """Give back everything, within seconds."""


class PlacedAtOnce:
    """What senders share whose batches are placed when `start` returns; see Sender."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self._finished: list[Batch] = []

    def finished(self) -> list[Batch]:
        finished, self._finished = self._finished, []
        return finished


class ReceiverEnd(Protocol):
    """The decode instance's end, for one prefill instance and one thread; `offer` is what the sender must know."""

    offer: Receiver

    def page(self, slot: int, num_bytes: int, payload: Bytes | None) -> Bytes | DevicePage | None:
        """Return a slot's bytes as no other process can change them, until the next call; None = there is no such."""

    def settle(self) -> None:
        """Return when pages that were taken are read, so that their slots may be used again."""

    def close(self) -> None:
        """Give back everything."""


class CopyingReceiver:
    """What receivers share that copy pages out of a window before they are read; see ReceiverEnd."""

    def __init__(self, offer: Receiver, window: Bytes) -> None:
        self.offer = offer
        self._window: Bytes | None = window
        self._page = np.empty(offer.slot_bytes, np.uint8)

    def page(self, slot: int, num_bytes: int, payload: Bytes | None) -> Bytes | None:
        window, size = self._window, self.offer.slot_bytes
        assert window is not None, "the receiver is open"
        if payload is not None or not 0 <= slot < self.offer.num_slots or num_bytes > size:
            return None
        page = self._page[:num_bytes]
        np.copyto(page, window[slot * size : slot * size + num_bytes])
        return page

    def settle(self) -> None:
        """See ReceiverEnd: they are copied."""


def window_slots(slot_bytes: int, window_bytes: int) -> int:
    """Return how many slots of this size a window has: at least two, so that one is filled while one is read."""
    return min(_MAX_SLOTS, max(2, window_bytes // slot_bytes))


def gather(pieces: Sequence[Bytes], into: Bytes) -> tuple[Bytes, int]:
    """Copy the pieces of a page one after another; return the page there, and its checksum."""
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        np.copyto(into[begin:end], piece)
    page = into[:end]
    return page, int(chunk_checksums(page, page.nbytes)[0])
