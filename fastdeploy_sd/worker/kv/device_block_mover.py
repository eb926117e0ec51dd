"""DeviceBlockMover: copies KV blocks of a GPU to pinned memory and back, without making steps wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fastdeploy_sd.device.cuda.blocks import MAX_COPIED_BLOCKS, CopyStream, CudaBlocks
from fastdeploy_sd.types import Bytes

# Of a batch, unless a block is larger: a step that overwrites one of its blocks waits a fraction of a millisecond.
_BATCH_BYTES = 16 << 20
_NO_BLOCK = -1


class DeviceBlockMover:
    """See BlockMover. A batch is one copy over the bus.

    A block that is released before its copy starts is left out. A started copy is completed, and steps wait for it: a
    read gets the block's old content, and a later step overwrites what was written.

    Args:
        blocks: of all layers.

    Raises:
        MemoryError: the device or the host has no memory for two batches.
    """

    def __init__(self, blocks: CudaBlocks) -> None:
        self.block_bytes = blocks.block_bytes
        self.max_blocks = min(max(_BATCH_BYTES // self.block_bytes, 1), MAX_COPIED_BLOCKS, blocks.num_blocks)
        self._lanes = [CopyStream(blocks, self.max_blocks * self.block_bytes, 2)]  # one, until `close`
        self._layers = range(blocks.num_layers)
        self._lock = threading.Lock()
        self._turn = 0
        self._block_ids: Sequence[int] = ()
        self._released: set[int] = set()

    def follow_steps(self) -> None:
        """See BlockMover."""
        self._lane.follow_steps()

    def begin(self, block_ids: Sequence[int]) -> None:
        """See BlockMover."""
        with self._lock:
            self._turn = 1 - self._turn
            self._block_ids = block_ids
            self._released.clear()

    def rows(self) -> Bytes:
        """See BlockMover; waits for the copy before the last, which used the same memory."""
        batch = self._lane.batches[self._turn]
        batch.wait()
        return batch.host.reshape(self.max_blocks, self.block_bytes)

    def read(self) -> Sequence[bool]:
        """See BlockMover."""
        batch = self._lane.batches[self._turn]
        with self._lock:
            block_ids = self._kept()
            self._lane.start_read(batch, self._layers, block_ids)
        batch.wait()
        return [block_id != _NO_BLOCK for block_id in block_ids]

    def write(self, are_wanted: Sequence[bool]) -> Sequence[bool]:
        """See BlockMover; the copy is only started."""
        with self._lock:
            block_ids = self._kept()
            block_ids = [b if is_wanted else _NO_BLOCK for b, is_wanted in zip(block_ids, are_wanted, strict=True)]
            self._lane.start_write(self._lane.batches[self._turn], self._layers, block_ids)
        return [block_id != _NO_BLOCK for block_id in block_ids]

    def release(self, block_ids: Sequence[int]) -> None:
        """See BlockMover."""
        with self._lock:
            self._released.update(block_ids)
            for batch in self._lane.batches:
                if not batch.block_ids.isdisjoint(block_ids):
                    self._lane.have_steps_follow(batch)

    def close(self) -> None:
        """See BlockMover; streams, events and memory."""
        while self._lanes:
            self._lanes.pop().close()

    @property
    def _lane(self) -> CopyStream:
        [lane] = self._lanes
        return lane

    def _kept(self) -> list[int]:
        """Return the batch's blocks, without those that were released."""
        return [_NO_BLOCK if block_id in self._released else block_id for block_id in self._block_ids]
