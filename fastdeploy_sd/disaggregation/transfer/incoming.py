"""The transfers a decode instance waits for, and the only place that writes its pages. Knows no socket.

One lock guards the table and every write: `cancel` returns when no write is under way, and afterwards the transfer's id
is unknown, so that nothing that comes late can reach a block that belongs to another request by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.disaggregation.transfer.counters import Counters, Failure, Refusal
from fastdeploy_sd.disaggregation.transfer.events import Event, EventQueue, Fetched, FetchFailed, TransferId
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, DevicePage, Pages
from fastdeploy_sd.types.stats import WayStats


@dataclass(slots=True)
class _Transfer:
    """A transfer that is waited for.

    Attributes:
        block_ids: of each KV group; negative = the page is not wanted.
        arrived: arrived[layer * num_blocks + i] says whether page i of a layer is written, or is not wanted.
        progress: when a page was written last, or its source was told to have computed something.
    """

    source: str
    first_block: int
    block_ids: Sequence[Sequence[int]]
    arrived: bytearray
    num_missing: int
    start: float
    timeout_s: float
    progress: float


class IncomingTable:
    """Transfers by id, from `add` until all pages came, or it failed, or was cancelled, which `events` is not told."""

    def __init__(
        self, pages: Pages, events: EventQueue, counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pages, self._events, self._counters, self._clock = pages, events, counters, clock
        self._lock = threading.Lock()
        self._transfers: dict[TransferId, _Transfer] = {}

    def add(
        self, transfer_id: TransferId, source: str, first_block: int, block_ids: Sequence[int], timeout_s: float
    ) -> None:
        """Wait for the pages of a prompt from `first_block` on in every layer, from `source` only.

        `block_ids`: see KvConnector.fetch. It ends when there is no progress for `timeout_s`.
        """
        of_groups, now = np.reshape(block_ids, (max(self._pages.groups) + 1, -1)), self._clock()
        arrived = (of_groups[self._pages.groups] < 0).astype(np.uint8)
        num_missing = int(arrived.size - arrived.sum())
        transfer = _Transfer(
            source, first_block, of_groups.tolist(), bytearray(arrived), num_missing, now, timeout_s, now
        )
        with self._lock:
            self._pages.follow_steps()  # some may use the blocks for the request that had them before
            self._transfers[transfer_id] = transfer

    def cancel(self, transfer_id: TransferId) -> str | None:
        """Forget a transfer, of which nothing is written or told from then on; returns its source, if it ran."""
        with self._lock:
            self._pages.end_writes()
            self._events.drop(transfer_id)
            transfer = self._transfers.pop(transfer_id, None)
            return None if transfer is None else transfer.source

    def take_events(self) -> list[Event]:
        """Return what has happened. For the thread that starts steps: those after this find the pages that came."""
        events = self._events.take()
        if events:
            with self._lock:
                self._pages.end_writes()
        return events

    def receive(
        self, transfer_id: TransferId, source: str, layer: int, block: int, data: Bytes | DevicePage, checksum: int
    ) -> Refusal | None:
        """Write a page that arrived; or return why not, which is counted. Damage ends the transfer."""
        refusal = self._receive(transfer_id, source, layer, block, data, checksum)
        if refusal is not None:
            self._counters.num_refused[refusal] += 1
        if refusal in (Refusal.DAMAGED, Refusal.WRONG_SIZE):
            place = f"layer {layer}, block {block}"
            self.fail(transfer_id, f"a page arrived with {_FAULTS[refusal]} ({place})", Failure.DAMAGED)
        return refusal

    def _receive(
        self, transfer_id: TransferId, source: str, layer: int, block: int, data: Bytes | DevicePage, checksum: int
    ) -> Refusal | None:
        # What never left the devices' memory has no checksum.
        is_whole = isinstance(data, DevicePage) or (
            data.nbytes > 0 and int(chunk_checksums(data, data.nbytes)[0]) == checksum
        )
        while True:
            with self._lock:
                refusal, wait = self._try_receive(transfer_id, source, layer, block, data, is_whole=is_whole)
            if wait is None:
                return refusal
            wait()  # the engine's thread does not, as it may have the lock meanwhile

    def _try_receive(
        self, transfer_id: TransferId, source: str, layer: int, block: int, data: Bytes | DevicePage, *, is_whole: bool
    ) -> tuple[Refusal | None, Callable[[], None] | None]:
        """Write a page, or return why not: refused, or what must be waited for first."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.source != source:
            return _unknown(transfer), None
        at, num_blocks = block - transfer.first_block, len(transfer.block_ids[0])
        if not (0 <= layer < self._pages.num_layers and 0 <= at < num_blocks):
            return Refusal.OUT_OF_BOUNDS, None
        block_id = transfer.block_ids[self._pages.groups[layer]][at]
        has_size = data.nbytes == self._pages.page_bytes(layer)
        if not (has_size and is_whole):
            return (Refusal.DAMAGED if has_size else Refusal.WRONG_SIZE), None
        index = layer * num_blocks + at
        if transfer.arrived[index]:
            return Refusal.DUPLICATE, None
        if isinstance(data, DevicePage):
            assert self._pages.port is not None, "pages of a device"
            self._pages.port.write_from(layer, block_id, data.address)
        elif (wait := self._pages.awaited(layer)) is not None:
            return None, wait
        else:
            self._pages.write(layer, block_id, data.data)
        transfer.arrived[index] = 1
        transfer.progress = self._clock()
        transfer.num_missing -= 1
        return None, None

    def finish(self, transfer_id: TransferId, source: str, drafts: tuple[int, ...], way: WayStats) -> None:
        """Note that the source sent everything: it has arrived, which `way` counts, or lacks pages and fails."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.source != source:
                self._counters.num_refused[_unknown(transfer)] += 1
                return
            if transfer.num_missing == 0:
                del self._transfers[transfer_id]
                way.num_transfers += 1
                way.seconds += self._clock() - transfer.start
                self._events.put(Fetched(transfer_id, drafts))
                return
            missing = f"{transfer.num_missing} of {len(transfer.arrived)} pages did not come"
        self.fail(transfer_id, missing, Failure.INCOMPLETE)

    def give_up(self, transfer_id: TransferId, source: str, reason: str) -> None:
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.source != source:
                self._counters.num_refused[_unknown(transfer)] += 1
                return
        self.fail(transfer_id, reason, Failure.FAILED)

    def fail(self, transfer_id: TransferId, reason: str, failure: Failure) -> None:
        """End a transfer without its pages, if it is still waited for."""
        with self._lock:
            if self._transfers.pop(transfer_id, None) is not None:
                self._events.put(FetchFailed(transfer_id, reason, failure))

    def fail_source(self, source: str, reason: str, failure: Failure) -> None:
        for transfer_id in self.of_source(source):
            self.fail(transfer_id, reason, failure)

    def fail_all(self, reason: str) -> None:
        with self._lock:
            sources = {transfer.source for transfer in self._transfers.values()}
        for source in sources:
            self.fail_source(source, reason, Failure.LOST)

    def of_source(self, source: str) -> list[TransferId]:
        with self._lock:
            return [transfer_id for transfer_id, t in self._transfers.items() if t.source == source]

    def note_progress(self, source: str, transfer_ids: Iterable[TransferId]) -> None:
        """Its source computes, and will come to these."""
        now = self._clock()
        with self._lock:
            for transfer_id in transfer_ids:
                transfer = self._transfers.get(transfer_id)
                if transfer is not None and transfer.source == source:
                    transfer.progress = now

    def expire(self) -> Iterable[tuple[TransferId, str]]:
        """End the transfers that have made no progress for their time, and return (id, source) of each."""
        now = self._clock()
        with self._lock:
            late = [(name, t) for name, t in self._transfers.items() if t.progress + t.timeout_s <= now]
        for transfer_id, transfer in late:
            waited = f"{transfer.num_missing} of {len(transfer.arrived)} pages did not come"
            text = f"{waited}, and there was no progress for {transfer.timeout_s:.1f} seconds"
            self.fail(transfer_id, text, Failure.DEADLINE)
        return [(transfer_id, transfer.source) for transfer_id, transfer in late]

    def waits_for(self, transfer_id: TransferId) -> bool:
        with self._lock:
            return transfer_id in self._transfers

    def __len__(self) -> int:
        return len(self._transfers)


_FAULTS = {Refusal.DAMAGED: "another checksum than it was sent with", Refusal.WRONG_SIZE: "another size than it has"}


def _unknown(transfer: _Transfer | None) -> Refusal:
    return Refusal.UNKNOWN_TRANSFER if transfer is None else Refusal.UNEXPECTED
