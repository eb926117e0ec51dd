"""Copies KV blocks to host memory and back for a BlockCopier, batch by batch: on the host, and on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from fastdeploy_sd.device.cuda.blocks import MAX_COPIED_BLOCKS, CopyStream, CudaBlocks
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import Bytes

# One page is copied in well under a millisecond, unless the machine does not run the thread.
_RELEASE_DEADLINE_S = 60.0


class BlockMover(Protocol):
    """One thread calls `begin`, then `rows`, `read` or `write`; the engine's thread calls the others meanwhile.

    Attributes:
        max_blocks: of a batch.
        block_bytes: of a block in all layers.
    """

    max_blocks: int
    block_bytes: int

    def follow_steps(self) -> None:
        """Make later copies follow the started steps. Called by the thread that starts steps."""
        ...

    def begin(self, block_ids: Sequence[int]) -> None:
        """Begin a batch, which may be read or written until `release`. Returns at once."""
        ...

    def rows(self) -> Bytes:
        """Return u8[max_blocks, block_bytes] for the batch, its first block first."""
        ...

    def read(self) -> Sequence[bool]:
        """Copy the batch's blocks to the rows; returns for each whether it was copied; a released one may not be.

        Raises ValueError: the device failed.
        """
        ...

    def write(self, are_wanted: Sequence[bool]) -> Sequence[bool]:
        """Copy rows to the blocks of the batch that are wanted and not released; returns for each whether it was one.

        Raises ValueError: the device failed.
        """
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """Make later steps follow the copies from or to these blocks, and stop copies that have not begun.

        Called by the thread that starts steps. Waits for one page at most, or for a batch where steps of other
        processes use the blocks.
        """
        ...

    def close(self) -> None:
        """Free the resources of copies, once the thread has ended. Nothing else may be called then."""
        ...


class Blocks(Protocol):
    """The bytes of blocks in host memory; `block_bytes`: of each, at most."""

    block_bytes: int

    def spans(self, block_id: int) -> Iterable[Sequence[Bytes]]:
        """Return the parts of a block in their order, u8[n] each, of every rank that has the same: views."""
        ...


class HostBlockMover:
    """See BlockMover. A batch is one block, copied part by part; a release stops it at the next part.

    No step is in flight when the engine continues, so no copy must follow one, and a release waits for the part.
    """

    max_blocks = 1

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self.block_bytes = blocks, blocks.block_bytes
        self._staging = np.empty((1, self.block_bytes), np.uint8)
        self._changed = threading.Condition()
        self._block_id = -1
        self._is_touched = False  # whether the block's bytes are read or written now
        self._is_released = False  # whether they should not be

    def follow_steps(self) -> None:
        """See BlockMover."""

    def begin(self, block_ids: Sequence[int]) -> None:
        with self._changed:
            [self._block_id] = block_ids
            self._is_released = False

    def rows(self) -> Bytes:
        return self._staging

    def read(self) -> Sequence[bool]:
        return [self._touch(_read)]

    def write(self, are_wanted: Sequence[bool]) -> Sequence[bool]:
        return [are_wanted[0] and self._touch(_write)]

    def release(self, block_ids: Sequence[int]) -> None:
        with self._changed:
            if self._block_id in block_ids:
                self._is_released = True
                if not self._changed.wait_for(lambda: not self._is_touched, _RELEASE_DEADLINE_S):
                    raise InternalError(f"a copy of KV block {self._block_id} does not stop")

    def close(self) -> None:
        """See BlockMover: it holds nothing."""

    def _touch(self, copy: Callable[[Sequence[Bytes], Bytes], None]) -> bool:
        with self._changed:
            if self._is_released:
                return False
            self._is_touched = True
        try:
            begin = 0
            for span in self._blocks.spans(self._block_id):
                if self._is_released:
                    return False
                end = begin + span[0].nbytes
                copy(span, self._staging[0, begin:end])
                begin = end
            self._staging[0, begin:] = 0
        finally:
            with self._changed:
                self._is_touched = False
                self._changed.notify_all()
        return True


def _read(span: Sequence[Bytes], staging: Bytes) -> None:
    staging[:] = span[0]


def _write(span: Sequence[Bytes], staging: Bytes) -> None:
    for copy in span:
        copy[:] = staging


# Of a batch, unless a block is larger: a step that overwrites one of its blocks waits a fraction of a millisecond.
_BATCH_BYTES = 16 << 20
_NO_BLOCK = -1


class DeviceBlockMover:
    """See BlockMover. A batch is one copy over the bus.

    A block that is released before its copy starts is left out. A started copy is completed, and steps wait for it: a
    read gets the block's old content, and a later step overwrites what was written. `blocks`: of all layers.

    Raises MemoryError: the device or the host has no memory for two batches.
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
        self._lane.follow_steps()

    def begin(self, block_ids: Sequence[int]) -> None:
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
