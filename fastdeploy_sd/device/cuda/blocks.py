"""Copies of KV blocks between a GPU and the host, on a stream of their own.

A batch of blocks is one copy over the bus, for any number of layers: a kernel gathers the blocks in staging memory of
the device, or scatters them from there. Two rules order the two streams:

    a copy runs after the steps started before it,         `CudaDevice.stream` records an event: follow_steps
    as they may still use the blocks
    a step runs after the copies of blocks that it         it waits for the batch's event: have_steps_follow
    reads or overwrites

Knows no layers, no scheduling and no threads.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.handles import new_event, new_stream
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import pinned_zeros
from fastdeploy_sd.device.device_tensor import DeviceTensor
from fastdeploy_sd.device.layout import struct_type

# kMaxCopiedBlocks of custom_ops/include/fdsd/device.h.
MAX_COPIED_BLOCKS = 256
_UNITS = (16, 4)


class CudaBlocks:
    """Where blocks are: in every layer some arrays with a row per block.

    A packed block is its rows in the first layer, then those in the next, and so on.

    Args:
        layers: per layer the arrays, each [num_blocks, ...], rows of whole 4-byte words; of one that is there several
            times, every copy.
        are_shared: whether steps of other processes use the blocks too, which this device's stream does not order.

    Attributes:
        begins: where a layer begins in a packed block, per layer, and the length of that.
        unit_bytes: all that is copied is a multiple of it long, and at a multiple of it.
    """

    def __init__(
        self, device: CudaDevice, layers: Sequence[Sequence[Sequence[DeviceTensor]]], *, are_shared: bool = False
    ) -> None:
        self.device, self.are_shared = device, are_shared
        every = [copy for layer in layers for copies in layer for copy in copies]
        self.num_blocks = min(map(len, every), default=0)
        assert all(len(copy) == self.num_blocks for copy in every), "layers of different numbers of blocks"
        self.begins = [0, *itertools.accumulate(sum(copies[0].row_bytes for copies in layer) for layer in layers)]
        self._most = [max((copies[0].row_bytes for copies in layer), default=0) for layer in layers]
        sizes = [copy.row_bytes for copy in every]
        self.unit_bytes = next((unit for unit in _UNITS if all(size % unit == 0 for size in sizes)), 0)
        assert self.unit_bytes, f"rows of {sizes} bytes, not all of whole words"
        # One copy is read, all are written.
        self._sources = _PieceTable(device, [[copies[:1] for copies in layer] for layer in layers])
        self._targets = self._sources if len(every) == self._sources.num_pieces else _PieceTable(device, layers)

    @property
    def block_bytes(self) -> int:
        return self.begins[-1]

    @property
    def num_layers(self) -> int:
        return len(self.begins) - 1

    def copy(self, layers: range, block_ids: Sequence[int], packed: int, stream: int, *, is_unpacking: bool) -> None:
        """Put a copy on a stream between blocks and packed ones, which have these layers only.

        Args:
            block_ids: at most MAX_COPIED_BLOCKS; of one below 0 only the place in packed memory is there.
            packed: address in the device's memory.
        """
        assert len(block_ids) <= MAX_COPIED_BLOCKS, f"{len(block_ids)} blocks at once"
        assert max(block_ids, default=-1) < self.num_blocks, f"expected blocks below {self.num_blocks}, got {block_ids}"
        ids = np.array(block_ids, np.int32)
        table = self._targets if is_unpacking else self._sources
        first, end = table.first[layers.start], table.first[layers.stop]
        params: Any = struct_type("CopyBlocksParams")(
            num_pieces=end - first,
            num_blocks=len(block_ids),
            is_unpacking=is_unpacking,
            unit_bytes=self.unit_bytes,
            max_num_bytes=max(self._most[layers.start : layers.stop], default=0),
            packed_bytes=self.begins[layers.stop] - self.begins[layers.start],
            begin=self.begins[layers.start],
            pieces=table.address_of(first),
            block_ids=ids.ctypes.data,
            packed=packed,
        )
        self.device.library.call("copy_blocks", ctypes.byref(params), stream)


class _PieceTable:
    """The arrays of all layers in the device's memory, as the kernel looks for them; `first`: of each layer."""

    def __init__(self, device: CudaDevice, layers: Sequence[Sequence[Sequence[DeviceTensor]]]) -> None:
        self.first = [0, *itertools.accumulate(sum(map(len, layer)) for layer in layers)]
        self._kept = [copy for layer in layers for copies in layer for copy in copies]
        piece_type: Any = struct_type("BlockPiece")
        table, begin, found = (piece_type * self.num_pieces)(), 0, iter(range(self.num_pieces))
        for copies in itertools.chain.from_iterable(layers):
            for copy in copies:
                piece = table[next(found)]
                piece.blocks, piece.begin, piece.num_bytes = copy.address, begin, copy.row_bytes
            begin += copies[0].row_bytes
        self._piece_bytes = ctypes.sizeof(piece_type)
        self._table = device.wrap(np.frombuffer(bytes(table), np.uint8))

    @property
    def num_pieces(self) -> int:
        return self.first[-1]

    def address_of(self, piece: int) -> int:
        address: int = self._table.address + piece * self._piece_bytes
        return address


class CopyBatch:
    """Copies that are made together; the event is recorded after the last. It forgets its blocks when that was seen."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library, self.event = library, new_event(library, sleeps=True)
        self.block_ids: frozenset[int] = frozenset()

    def wait(self) -> None:
        """Return when its last copy is made; raises ValueError where the device failed."""
        self._library.call("event_synchronize", self.event.address)
        self.block_ids = frozenset()


class StagedBatch(CopyBatch):
    """Pinned memory of the host that blocks go through, and the device's of the same size. Serves a batch at a time."""

    def __init__(self, device: CudaDevice, num_bytes: int) -> None:
        super().__init__(device.library)
        self.host = pinned_zeros(device.library, num_bytes)
        self._memory, self.address = device.memory.take(num_bytes)


class CopyStream:
    """A stream of copies between blocks and staged batches."""

    def __init__(self, blocks: CudaBlocks, batch_bytes: int, num_batches: int) -> None:
        self._blocks, self._device = blocks, blocks.device
        self._call = self._device.library.call
        self.batches = [StagedBatch(self._device, batch_bytes) for _ in range(num_batches)]
        self._own_stream = new_stream(self._device.library)
        self._stream = self._own_stream.address
        self._started = new_event(self._device.library, sleeps=True)

    def follow_steps(self) -> None:
        """Have copies that are started from here on follow the steps that were. For the thread that starts steps."""
        self._call("event_record", self._started.address, self._device.stream)

    def start_read(self, batch: StagedBatch, layers: range, block_ids: Sequence[int]) -> None:
        """Start to fill a batch's memory of the host with packed blocks; they are there when `batch.wait` returns."""
        self._call("stream_wait", self._stream, self._started.address)
        self._blocks.copy(layers, block_ids, batch.address, self._stream, is_unpacking=False)
        self._copy(address(batch.host), batch.address, layers, block_ids)
        self._note(batch, block_ids)

    def start_write(self, batch: StagedBatch, layers: range, block_ids: Sequence[int]) -> None:
        """Start to overwrite blocks with what a batch's memory of the host holds, packed, until `batch.wait`."""
        self._call("stream_wait", self._stream, self._started.address)
        self._copy(batch.address, address(batch.host), layers, block_ids)
        self._blocks.copy(layers, block_ids, batch.address, self._stream, is_unpacking=True)
        self._note(batch, block_ids)

    def start_direct(
        self, batch: CopyBatch, layer: int, block_ids: Sequence[int], places: Sequence[int], *, is_unpacking: bool
    ) -> None:
        """Start to copy a layer of blocks to addresses that the device reaches, or from there, until `batch.wait`."""
        self._call("stream_wait", self._stream, self._started.address)
        for block_id, place in zip(block_ids, places, strict=True):
            self._blocks.copy(range(layer, layer + 1), [block_id], place, self._stream, is_unpacking=is_unpacking)
        self._note(batch, block_ids)

    def have_steps_follow(self, batch: CopyBatch) -> None:
        """Have steps that are started from here on follow the batch's last copy.

        Waits for it only where other processes' steps use the blocks: those begin when this thread says so.
        """
        if self._blocks.are_shared:
            batch.wait()
        else:
            self._call("stream_wait", self._device.stream, batch.event.address)

    def close(self) -> None:
        """Wait for all copies; none may be started then. The rest goes with this object."""
        self._device.library.discard("stream_synchronize", self._stream)

    def _copy(self, to: int, source: int, layers: range, block_ids: Sequence[int]) -> None:
        num_bytes = len(block_ids) * (self._blocks.begins[layers.stop] - self._blocks.begins[layers.start])
        self._call("start_copy", to, source, ctypes.c_int64(num_bytes), self._stream)

    def _note(self, batch: CopyBatch, block_ids: Sequence[int]) -> None:
        self._call("event_record", batch.event.address, self._stream)
        batch.block_ids = frozenset(block_ids) - {-1}
