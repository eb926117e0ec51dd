"""Connectors without sockets: pages move between engines of this process when a test says so, in any order.

A page is read when it moves, not when it was sent, so a block that was given away too early shows.
"""

from __future__ import annotations

import random
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.disaggregation.transfer.counters import Failure
from fastdeploy_sd.disaggregation.transfer.events import (
    Event,
    Fetched,
    FetchFailed,
    PrefillCancelled,
    PrefillWanted,
    Sent,
)
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.types import KvDescription, KvSource, Request, RequestId
from fastdeploy_sd.types.stats import TransferStats

_QUIET = select.epoll()  # never readable: tests drive a wire by asking it
SOURCE = KvSource("p", "tcp://127.0.0.1:1")


@dataclass(eq=False)
class _Transfer:
    """What goes from one end to the other: (layer, block of the prompt, block id) of pages that were sent.

    Attributes:
        block_ids: of each KV group; negative = the page is not wanted.
    """

    request_id: RequestId
    first_block: int
    block_ids: Sequence[Sequence[int]]
    num_missing: int
    moving: list[tuple[int, int, int]] = field(default_factory=list)
    drafts: tuple[int, ...] | None = None


class DecodeEnd:
    """See DecodeConnector's Fetcher."""

    def __init__(self, wire: Wire) -> None:
        self.fd, self.events, self._wire = _QUIET.fileno(), list[Event](), wire

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def fetch(
        self, request: Request, source: KvSource, first_block: int, block_ids: Sequence[int], timeout_s: float
    ) -> str:
        assert source == SOURCE
        assert timeout_s > 0
        return self._wire.begin(request, first_block, block_ids)

    def cancel(self, transfer_id: str) -> None:
        self._wire.cancel(transfer_id)


class PrefillEnd:
    """See PrefillEngine's Sender."""

    def __init__(self, wire: Wire) -> None:
        self.fd, self.address, self.events, self._wire = _QUIET.fileno(), SOURCE.address, list[Event](), wire
        self.description = KvDescription("double", "", 1, "", 1, 1, 1, (1,))

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def send(self, transfer_id: str, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        self._wire.send(transfer_id, layer, first_block, block_ids)

    def note_step(self) -> None:
        """No test waits for a time here."""

    def finish(self, transfer_id: str, drafts: tuple[int, ...]) -> None:
        self._wire.finish(transfer_id, drafts)

    def stats(self) -> TransferStats:
        return TransferStats()

    def fail(self, transfer_id: str, reason: str) -> None:
        self._wire.end(transfer_id, FetchFailed(transfer_id, reason, Failure.FAILED))


class Wire:
    """Both ends.

    Attributes:
        source_pages, target_pages: of the prefill and the decode instance; to be set before anything moves.
        before_move: called with (transfer id, request id, group, block id at the source, at the target) of each page.
        num_moved, num_whole, num_failed, num_cancelled: pages, and transfers by their ends.
    """

    def __init__(self, seed: int) -> None:
        self.decode, self.prefill = DecodeEnd(self), PrefillEnd(self)
        self.source_pages: Pages | None = None
        self.target_pages: Pages | None = None
        self.before_move: Callable[[str, RequestId, int, int, int], None] = lambda *_: None
        self.num_moved = self.num_whole = self.num_failed = self.num_cancelled = self.num_begun = 0
        self._random = random.Random(seed)
        self._transfers: dict[str, _Transfer] = {}

    @property
    def waiting(self) -> list[str]:
        """Transfers that have not ended."""
        return list(self._transfers)

    def begin(self, request: Request, first_block: int, block_ids: Sequence[int]) -> str:
        assert self.target_pages is not None
        transfer_id = f"transfer-{self.num_begun}"
        self.num_begun += 1
        groups = self.target_pages.groups
        size = len(block_ids) // (max(groups) + 1)
        of_groups = [block_ids[begin : begin + size] for begin in range(0, len(block_ids), size)]
        num_missing = sum(block_id >= 0 for group in groups for block_id in of_groups[group])
        self._transfers[transfer_id] = _Transfer(request.request_id, first_block, of_groups, num_missing)
        self.prefill.events.append(PrefillWanted(transfer_id, request, first_block, size))
        return transfer_id

    def cancel(self, transfer_id: str) -> None:
        self.decode.events = [event for event in self.decode.events if event.transfer_id != transfer_id]
        if self._transfers.pop(transfer_id, None) is not None:
            self.num_cancelled += 1
            self.prefill.events += [PrefillCancelled(transfer_id), Sent(transfer_id)]

    def lose(self, transfer_id: str) -> None:
        """Neither end hears of the other any more."""
        del self._transfers[transfer_id]
        self.num_failed += 1
        self.decode.events.append(FetchFailed(transfer_id, "lost", Failure.LOST))
        self.prefill.events += [PrefillCancelled(transfer_id), Sent(transfer_id)]

    def send(self, transfer_id: str, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        assert transfer.drafts is None, "pages after the end"
        for block, block_id in enumerate(block_ids, first_block):
            assert 0 <= block - transfer.first_block < len(transfer.block_ids[0]), "a page that was not ordered"
            transfer.moving.append((layer, block, block_id))

    def finish(self, transfer_id: str, drafts: tuple[int, ...]) -> None:
        if transfer_id in self._transfers:
            self._transfers[transfer_id].drafts = drafts
            self._settle(transfer_id)

    def end(self, transfer_id: str, event: Event) -> None:
        if self._transfers.pop(transfer_id, None) is not None:
            self.num_failed += isinstance(event, FetchFailed)
            self.num_whole += isinstance(event, Fetched)
            self.decode.events.append(event)
            self.prefill.events.append(Sent(transfer_id))

    def pump(self, num_pages: int) -> None:
        """Move so many pages, of any transfers."""
        for _ in range(num_pages):
            ready = [i for i, transfer in self._transfers.items() if transfer.moving]
            if not ready:
                return
            transfer_id = self._random.choice(ready)
            self._move(transfer_id, self._transfers[transfer_id])
            self._settle(transfer_id)

    def _move(self, transfer_id: str, transfer: _Transfer) -> None:
        assert self.source_pages is not None
        assert self.target_pages is not None
        layer, block, source_id = transfer.moving.pop(self._random.randrange(len(transfer.moving)))
        if layer >= self.target_pages.num_layers:
            return  # the decode instance has no such draft layer
        group = self.target_pages.groups[layer]
        target_id = transfer.block_ids[group][block - transfer.first_block]
        assert target_id >= 0, "a page that is of no use"
        self.before_move(transfer_id, transfer.request_id, group, source_id, target_id)
        data = b"".join(part.tobytes() for part in self.source_pages.read_all(layer, [source_id])[0])
        self.target_pages.write(layer, target_id, memoryview(data))
        self.num_moved += 1
        transfer.num_missing -= 1

    def _settle(self, transfer_id: str) -> None:
        transfer = self._transfers[transfer_id]
        if transfer.drafts is not None and not transfer.moving:
            assert transfer.num_missing == 0, f"{transfer.num_missing} pages of {transfer_id} were not sent"
            self.end(transfer_id, Fetched(transfer_id, transfer.drafts))
