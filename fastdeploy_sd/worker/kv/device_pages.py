"""DevicePages: the KV of a GPU in pages, for other instances. As KvPages, but a page's bytes are the GPU's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device.cuda.blocks import MAX_COPIED_BLOCKS, CopyBatch, CopyStream, CudaBlocks, StagedBatch
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.sharing import handle_of, open_verified, take_shareable
from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.worker.kv.kv_memory import RankKv
from fastdeploy_sd.worker.kv.kv_pages import groups_of_layers, pieces_of_layers, verify_page

# Of a batch, unless a page is larger.
_BATCH_BYTES = 4 << 20


class DevicePages:
    """Pages of all layers over the same blocks, of all ranks: this GPU reaches the KV of the others.

    Reading waits for the GPU. Written pages are copied in batches; `end_writes` starts the last one. One thread reads;
    only one thread at a time may write or call `end_writes`.

    Args:
        ranks: all of them.
        is_read, is_written: whether other instances read pages from here, or write some; memory is allocated for that.

    Raises:
        MemoryError: the GPU or the host has no memory for batches.

    Attributes:
        num_layers: target and draft layers together. num_target_layers: the first ones. groups: KV group of each layer.
        host_bytes: of host memory that they take: 0.
    """

    host_bytes = 0

    def __init__(
        self, device: CudaDevice, ranks: Sequence[RankKv], *, is_read: bool = False, is_written: bool = False
    ) -> None:
        layers: Any = pieces_of_layers(ranks)
        self.num_target_layers, self.num_layers = len(ranks[0].caches), len(layers)
        self.groups: Sequence[int] = groups_of_layers(ranks)
        self._blocks: CudaBlocks | None = CudaBlocks(device, layers, are_shared=len(ranks) > 1)
        self.num_blocks = self.blocks.num_blocks
        self._batch_bytes = max([_BATCH_BYTES, *map(self.page_bytes, range(self.num_layers))])
        self._reading = CopyStream(self.blocks, self._batch_bytes, 1) if is_read else None
        self._writing = CopyStream(self.blocks, self._batch_bytes, 2) if is_written else None
        lane = self._reading or self._writing
        self._port = None if lane is None else CudaPort(self.blocks, lane, self._verify)
        self._staged: list[int] = []  # blocks whose pages wait in the batch, all of one layer
        self._layer = 0
        self._turn = 0
        self._last: StagedBatch | None = None  # whose writes were started and no step follows

    @property
    def blocks(self) -> CudaBlocks:
        """The blocks of all layers; valid until `close`."""
        assert self._blocks is not None, "pages that are open"
        return self._blocks

    @property
    def port(self) -> CudaPort | None:
        """See transfer.pages.Pages; until `close`."""
        return self._port

    def page_bytes(self, layer: int) -> int:
        """Return the length of a page of this layer."""
        return self.blocks.begins[layer + 1] - self.blocks.begins[layer]

    def follow_steps(self) -> None:
        for lane in (self._reading, self._writing):
            if lane is not None:
                lane.follow_steps()

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        """See transfer.pages.Pages: copies of the pages, which the next call overwrites.

        More pages than fit into a batch are read in several batches, and copied once more. Raises IndexError: no such
        layer or block; ValueError: the GPU failed.
        """
        for block_id in block_ids:
            self._verify(layer, block_id)
        num_bytes, found = self.page_bytes(layer), list[tuple[Bytes, ...]]()
        most = self._max_pages(num_bytes)
        assert self._reading is not None, "pages that are read"
        [batch] = self._reading.batches
        for begin in range(0, len(block_ids), most):
            part = block_ids[begin : begin + most]
            self._reading.start_read(batch, range(layer, layer + 1), part)
            batch.wait()
            pages = batch.host[: len(part) * num_bytes].reshape(len(part), num_bytes)
            found += [(page,) for page in (pages if len(block_ids) <= most else pages.copy())]
        return found

    def awaited(self, layer: int) -> Callable[[], None] | None:
        """See transfer.pages.Pages: the copy before the last, which had the same memory.

        Raises IndexError: no such layer.
        """
        self._verify(layer, 0)
        assert self._writing is not None, "pages that are written"
        if self._staged and not self._is_full(layer):
            return None
        batch = self._writing.batches[1 - self._turn if self._staged else self._turn]
        return batch.wait if batch.block_ids else None

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """See transfer.pages.Pages.

        Raises:
            IndexError: no such layer or block.
            ValueError: the data is not as long as the page, and nothing was written; or the GPU failed.
        """
        self._verify(layer, block_id)
        num_bytes = self.page_bytes(layer)
        if data.nbytes != num_bytes:
            raise ValueError(f"page of layer {layer}: expected {num_bytes} bytes, got {data.nbytes}")
        if self._staged and self._is_full(layer):
            self._start()
        assert self._writing is not None, "pages that are written"
        batch = self._writing.batches[self._turn]
        if not self._staged:
            batch.wait()  # see `awaited`
        begin = len(self._staged) * num_bytes
        batch.host[begin : begin + num_bytes] = np.frombuffer(data, np.uint8)
        self._layer = layer
        self._staged.append(block_id)

    def end_writes(self) -> None:
        self._start()
        if self._writing is not None and self._last is not None:
            self._writing.have_steps_follow(self._last)
            self._last = None
        if self._port is not None:
            self._port.end_writes()

    def close(self) -> None:
        """Free streams, events and memory, and unmap other ranks' KV; no page may be read or written then."""
        for lane in (self._reading, self._writing):
            if lane is not None:
                lane.close()
        self._reading = self._writing = self._last = self._blocks = self._port = None

    def _start(self) -> None:
        """Start the copy of the waiting batch."""
        if self._writing is not None and self._staged:
            batch = self._last = self._writing.batches[self._turn]
            self._writing.start_write(batch, range(self._layer, self._layer + 1), self._staged)
            self._staged = []
            self._turn = 1 - self._turn

    def _is_full(self, layer: int) -> bool:
        """Whether a page of this layer does not fit into the batch that waits."""
        return layer != self._layer or len(self._staged) == self._max_pages(self.page_bytes(layer))

    def _max_pages(self, num_bytes: int) -> int:
        return min(self._batch_bytes // num_bytes, MAX_COPIED_BLOCKS)

    def _verify(self, layer: int, block_id: int) -> None:
        verify_page(layer, block_id, self.num_layers, self.num_blocks)


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
        memory = take_shareable(self._library, num_bytes)
        return memory, handle_of(self._library, memory)

    def open_window(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        return open_verified(self._library, handle, num_bytes)

    def send(self, layer: int, block_ids: Sequence[int], places: Sequence[int]) -> None:
        self._start(layer, block_ids, places, is_unpacking=False)
        self._batch.wait()

    def write_from(self, layer: int, block_id: int, place: int) -> None:
        self._start(layer, [block_id], [place], is_unpacking=True)

    def finish(self) -> None:
        self._batch.wait()

    def end_writes(self) -> None:
        """Make later steps follow the writes."""
        if self._batch.block_ids:
            self._lane.have_steps_follow(self._batch)

    def _start(self, layer: int, block_ids: Sequence[int], places: Sequence[int], *, is_unpacking: bool) -> None:
        for block_id in block_ids:
            self._verify(layer, block_id)
        self._lane.start_direct(self._batch, layer, block_ids, places, is_unpacking=is_unpacking)
