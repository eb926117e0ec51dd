"""What a prefill instance sends to one decode instance: transfers in turn, within the receiver's window.

Knows no socket. The transport copies pages when it starts a batch, so nothing reads them once no more are started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.disaggregation.transfer.events import TransferId
from fastdeploy_sd.disaggregation.transfer.messages import TransferDone, TransferFailed
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.disaggregation.transports.transport import Batch, Sender

_BATCH_PAGES = 8


@dataclass(slots=True)
class Outgoing:
    """A transfer from PrefillWanted to Sent.

    Attributes:
        pages: (layer, block of the prompt, block id) that wait to be sent, in the order they became ready.
        num_moving: batches that were started and are not placed yet.
        end: what to say when all that is gone; None = more pages may come.
        start: when it was ordered, in seconds. renewed: when its receiver last said that it waits.
    """

    transfer_id: TransferId
    first_block: int
    end_block: int
    num_layers: int
    start: float
    renewed: float
    pages: deque[tuple[int, int, int]] = field(default_factory=deque)
    num_moving: int = 0
    end: TransferDone | TransferFailed | None = None

    def add(self, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Queue pages of consecutive blocks in a layer; those that were not ordered are left out."""
        if layer < self.num_layers and self.end is None:
            blocks = enumerate(block_ids, first_block)
            self.pages.extend((layer, b, block_id) for b, block_id in blocks if self.first_block <= b < self.end_block)

    def take(self, most: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return (layer, blocks, block ids) of at most `most` waiting pages of one layer, removing them."""
        layer = self.pages[0][0]
        blocks: list[int] = []
        block_ids: list[int] = []
        while self.pages and self.pages[0][0] == layer and len(blocks) < most:
            _, block, block_id = self.pages.popleft()
            blocks.append(block)
            block_ids.append(block_id)
        return layer, tuple(blocks), tuple(block_ids)

    def fail(self, reason: str) -> None:
        self.pages.clear()
        self.end = TransferFailed(self.transfer_id, reason)

    @property
    def is_over(self) -> bool:
        """Whether only the end is left to be said."""
        return self.end is not None and not self.pages and self.num_moving == 0


class Peer:
    """A decode instance, as a prefill instance sees it; it has a `sender` while its window is open."""

    def __init__(self, identity: bytes, instance_id: str, num_layers: int, last_seen: float) -> None:
        self.identity, self.instance_id, self.num_layers, self.last_seen = identity, instance_id, num_layers, last_seen
        self.sender: Sender | None = None
        self.protocol = ""
        self.transfers: dict[TransferId, Outgoing] = {}
        self._turns: deque[Outgoing] = deque()  # those whose pages wait, the next one first
        self._free: list[int] = []
        self._used: set[int] = set()

    def open(self, sender: Sender, protocol: str, num_slots: int) -> None:
        """Send through a window from now on."""
        self.sender, self.protocol = sender, protocol
        self._free = list(range(num_slots))

    def add_pages(self, transfer: Outgoing, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        was_waiting = bool(transfer.pages)
        transfer.add(layer, first_block, block_ids)
        if transfer.pages and not was_waiting:
            self._turns.append(transfer)

    def start(self, pages: Pages) -> bool:
        """Start a batch of the transfer whose turn it is; False when none waits, or there is no credit."""
        if self.sender is None or not self._free:
            return False
        while self._turns and not self._turns[0].pages:
            self._turns.popleft()  # it ended
        if not self._turns:
            return False
        transfer = self._turns.popleft()
        layer, blocks, block_ids = transfer.take(min(_BATCH_PAGES, len(self._free)))
        slots = tuple(self._free.pop() for _ in blocks)  # the last ones that came back are in a cache still
        self._used.update(slots)
        transfer.num_moving += 1
        if transfer.pages:
            self._turns.append(transfer)
        batch = Batch(transfer, layer, blocks, slots)
        self.sender.start(batch, pages, block_ids)
        return True

    def placed(self) -> Iterator[Batch]:
        """Yield the batches that can be announced; the slots of failed ones, and of ended transfers', come back.

        A transfer counts a batch as moving until it is yielded: its end must not be said before the last announcement.
        """
        for batch in self.sender.finished() if self.sender is not None else []:
            batch.owner.num_moving -= 1
            if batch.error or batch.owner.transfer_id not in self.transfers:
                self.give_back(batch.slots)
            yield batch

    def give_back(self, slots: Sequence[int]) -> bool:
        """Take slots that were read, each once; False, and nothing happens, when one was not in use."""
        if not self._used.issuperset(slots) or len(set(slots)) < len(slots):
            return False
        self._used.difference_update(slots)
        self._free.extend(slots)
        return True

    def close(self) -> None:
        self._turns.clear()
        if self.sender is not None:
            self.sender.close()
            self.sender = None
