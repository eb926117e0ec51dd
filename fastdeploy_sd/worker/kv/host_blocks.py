"""HostBlocks: what the second level copies from host memory and back, by the numbers of BlockStore."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.types import Bytes
from fastdeploy_sd.worker.kv.kv_pages import KvPages
from fastdeploy_sd.worker.kv.state_memory import StateMemory, pieces_of_states


class HostBlocks:
    """Blocks of the KV cache, then the pieces of each snapshot; see block_mover.Blocks.

    A snapshot is the parts of all its layers, one after the other, cut where a block's size is full.

    Args:
        pages: of the KV. states: of the same ranks; empty = the model has no recurrent states.

    Attributes:
        num_blocks: of the KV cache. num_state_pieces: of a snapshot. state_bytes: of a snapshot on all ranks.
    """

    def __init__(self, pages: KvPages, states: Sequence[StateMemory]) -> None:
        self._pages, self.block_bytes, self.num_blocks = pages, pages.block_bytes, pages.num_blocks
        self._pieces: list[list[tuple[tuple[Bytes, ...], slice]]] = []
        room = 0
        for part in [part for net in pieces_of_states(states) for part in net] if states else ():
            begin, num_bytes = 0, part[0].shape[1]
            while begin < num_bytes:
                if not room:
                    self._pieces.append([])
                    room = self.block_bytes
                end = min(begin + room, num_bytes)
                self._pieces[-1].append((part, slice(begin, end)))
                room -= end - begin
                begin = end
        self.num_state_pieces = len(self._pieces)
        self.state_bytes = len(self._pieces) * self.block_bytes - room

    def spans(self, block_id: int) -> Sequence[Sequence[Bytes]]:
        if block_id < self.num_blocks:
            return self._pages.spans(block_id)
        snapshot, piece = divmod(block_id - self.num_blocks, self.num_state_pieces)
        return [[copy[snapshot, part] for copy in copies] for copies, part in self._pieces[piece]]
