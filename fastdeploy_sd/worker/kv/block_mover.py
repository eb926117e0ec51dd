"""BlockMover: copies KV blocks to host memory and back for a BlockCopier, batch by batch.

HostBlockMover is for blocks that are in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

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

        Raises:
            ValueError: the device failed.
        """
        ...

    def write(self, are_wanted: Sequence[bool]) -> Sequence[bool]:
        """Copy rows to the blocks of the batch that are wanted and not released; returns for each whether it was one.

        Raises:
            ValueError: the device failed.
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


class Pages(Protocol):
    """The bytes of blocks, layer by layer; see KvPages."""

    num_layers: int

    def page_bytes(self, layer: int) -> int:
        """Return the length of a page of this layer."""
        ...

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        """Return the parts of pages, u8[n] each."""
        ...

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page with its parts, one after the other."""
        ...


class HostBlockMover:
    """See BlockMover. A batch is one block, copied page by page; a release stops it at the next page.

    No step is in flight when the engine continues, so no copy must follow one, and a release waits for the page.
    """

    max_blocks = 1

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.block_bytes = sum(pages.page_bytes(layer) for layer in range(pages.num_layers))
        self._staging = np.empty((1, self.block_bytes), np.uint8)
        self._changed = threading.Condition()
        self._block_id = -1
        self._is_touched = False  # whether the block's bytes are read or written now
        self._is_released = False  # whether they should not be

    def follow_steps(self) -> None:
        """See BlockMover."""

    def begin(self, block_ids: Sequence[int]) -> None:
        """See BlockMover."""
        with self._changed:
            [self._block_id] = block_ids
            self._is_released = False

    def rows(self) -> Bytes:
        """See BlockMover."""
        return self._staging

    def read(self) -> Sequence[bool]:
        """See BlockMover."""
        return [self._touch(self._read_page)]

    def write(self, are_wanted: Sequence[bool]) -> Sequence[bool]:
        """See BlockMover."""
        return [are_wanted[0] and self._touch(self._write_page)]

    def release(self, block_ids: Sequence[int]) -> None:
        """See BlockMover."""
        with self._changed:
            if self._block_id in block_ids:
                self._is_released = True
                if not self._changed.wait_for(lambda: not self._is_touched, _RELEASE_DEADLINE_S):
                    raise InternalError(f"a copy of KV block {self._block_id} does not stop")

    def close(self) -> None:
        """See BlockMover: it holds nothing."""

    def _touch(self, copy_page: Callable[[int, int], None]) -> bool:
        with self._changed:
            self._is_touched = not self._is_released
        try:
            begin = 0
            for layer in range(self._pages.num_layers):
                if self._is_released:
                    return False
                copy_page(layer, begin)
                begin += self._pages.page_bytes(layer)
        finally:
            with self._changed:
                self._is_touched = False
                self._changed.notify_all()
        return True

    def _read_page(self, layer: int, begin: int) -> None:
        for part in self._pages.read_all(layer, [self._block_id])[0]:
            self._staging[0, begin : begin + part.nbytes] = part
            begin += part.nbytes

    def _write_page(self, layer: int, begin: int) -> None:
        end = begin + self._pages.page_bytes(layer)
        self._pages.write(layer, self._block_id, self._staging[0].data[begin:end])
