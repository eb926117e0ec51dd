"""DevicePort of a GPU: copies pages to and from memory shared with another process of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy_sd.device.cuda.blocks import CopyBatch, CopyStream, CudaBlocks
from fastdeploy_sd.device.cuda.sharing import handle_of, open_verified, take_shareable
from fastdeploy_sd.device.memory import DeviceMemory


class CudaPort:
    """See transfer.pages.DevicePort.

    Args:
        blocks: of all layers. lane: copies them.
        verify: raises IndexError for an unknown layer or block.
    """

    def __init__(self, blocks: CudaBlocks, lane: CopyStream, verify: Callable[[int, int], None]) -> None:
        self._blocks, self._lane, self._verify = blocks, lane, verify
        self._library = blocks.device.library
        self._batch = CopyBatch(self._library)
        self.unit_bytes = blocks.unit_bytes

    def make_window(self, num_bytes: int) -> tuple[DeviceMemory, bytes]:
        """See DevicePort."""
        memory = take_shareable(self._library, num_bytes)
        return memory, handle_of(self._library, memory)

    def open_window(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """See DevicePort."""
        return open_verified(self._library, handle, num_bytes)

    def send(self, layer: int, block_ids: Sequence[int], places: Sequence[int]) -> None:
        """See DevicePort."""
        self._start(layer, block_ids, places, is_unpacking=False)
        self._batch.wait()

    def write_from(self, layer: int, block_id: int, place: int) -> None:
        """See DevicePort."""
        self._start(layer, [block_id], [place], is_unpacking=True)

    def finish(self) -> None:
        """See DevicePort."""
        self._batch.wait()

    def end_writes(self) -> None:
        """Make later steps follow the writes."""
        if self._batch.block_ids:
            self._lane.have_steps_follow(self._batch)

    def _start(self, layer: int, block_ids: Sequence[int], places: Sequence[int], *, is_unpacking: bool) -> None:
        for block_id in block_ids:
            self._verify(layer, block_id)
        self._lane.start_direct(self._batch, layer, block_ids, places, is_unpacking=is_unpacking)
