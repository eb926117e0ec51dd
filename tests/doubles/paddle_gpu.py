"""A GPU build of Paddle as far as memory goes, over the emulated GPU: no such build runs without a GPU.

What it has is what Paddle 3 documents, and does by its sources: one cache of chunks, of which tensors get pieces; a
piece is given on as soon as its tensor is gone, whatever the GPU still does there; chunks without tensors go back to
the driver when asked for, or when the driver has no more.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.cuda.handles import new_stream
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import pinned_zeros
from fastdeploy_sd.types import Bytes

_UNIT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Of a GPU."""

    number: int


@dataclass(slots=True, eq=False)
class Chunk:
    """Memory of the driver; `pieces`: what tensors have of it, offset -> bytes."""

    begin: int
    num_bytes: int
    pieces: dict[int, int] = field(default_factory=dict)

    def room(self, size: int) -> int | None:
        """Return the first offset with room, None where there is none."""
        begin = 0
        for offset, taken in sorted(self.pieces.items()):
            if offset - begin >= size:
                return begin
            begin = offset + taken
        return begin if self.num_bytes - begin >= size else None


class Tensor:
    """Bytes of a GPU."""

    def __init__(self, begin: int, num_bytes: int) -> None:
        self._begin, self.num_bytes = begin, num_bytes

    def data_ptr(self) -> int:
        return self._begin


class PaddleGpu:
    """Takes the place of Paddle's functions while `patch` lasts.

    Args:
        capacity: bytes of the GPU that the driver gives.
    """

    def __init__(self, library: CudaLibrary, patch: pytest.MonkeyPatch, capacity: int = 256 << 20) -> None:
        self.library, self.capacity = library, capacity
        self._stream = new_stream(library)
        self._chunks: list[Chunk] = []
        self._peak = 0
        self._sources: list[Bytes] = []  # which are read later
        cpu_empty = paddle._C_ops.empty

        def empty(shape: Sequence[int], dtype: paddle.dtype, place: Any, **others: Any) -> Any:
            return self.empty(shape[0]) if isinstance(place, Place) else cpu_empty(shape, dtype, place, **others)

        patch.setattr(paddle._C_ops, "empty", empty)
        patch.setattr(paddle, "CUDAPlace", Place)
        patch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
        patch.setattr(paddle.device.cuda, "current_stream", lambda _: self)
        patch.setattr(paddle.device.cuda, "empty_cache", self.empty_cache)
        patch.setattr(paddle.device.cuda, "memory_reserved", lambda _: self.reserved)
        patch.setattr(paddle.device.cuda, "memory_allocated", lambda _: self.allocated)
        patch.setattr(paddle.device.cuda, "max_memory_allocated", lambda _: self._peak)
        patch.setattr(CudaLibrary, "memory_bytes", lambda _: (capacity, capacity - self.reserved))

    @property
    def reserved(self) -> int:
        return sum(chunk.num_bytes for chunk in self._chunks)

    @property
    def allocated(self) -> int:
        return sum(sum(chunk.pieces.values()) for chunk in self._chunks)

    def empty(self, num_bytes: int) -> Tensor:
        """Return a tensor of a program; raises MemoryError."""
        size = -(-num_bytes // _UNIT) * _UNIT
        chunk = next((chunk for chunk in self._chunks if chunk.room(size) is not None), None)
        if chunk is None:
            if self.reserved + size > self.capacity:
                self.empty_cache()
            if self.reserved + size > self.capacity:
                raise MemoryError(f"(ResourceExhausted) Out of memory error on GPU 0. Cannot allocate {size} bytes.")
            chunk = Chunk(self.library.made("allocate", ctypes.c_int64(size)), size)
            self._chunks.append(chunk)
        offset = chunk.room(size)
        assert offset is not None
        chunk.pieces[offset] = size
        self._peak = max(self._peak, self.allocated)
        tensor = Tensor(chunk.begin + offset, num_bytes)
        weakref.finalize(tensor, chunk.pieces.pop, offset)
        return tensor

    def empty_cache(self) -> None:
        """See Paddle."""
        for chunk in [chunk for chunk in self._chunks if not chunk.pieces]:
            self._chunks.remove(chunk)
            self.library.call("free", chunk.begin)

    def fill(self, tensor: Tensor, value: int) -> None:
        """Start to fill a tensor with bytes, as a program does, which waits for nothing."""
        source = pinned_zeros(self.library, tensor.num_bytes)
        source[:] = value
        size = ctypes.c_int64(tensor.num_bytes)
        self.library.call("start_copy", tensor.data_ptr(), address(source), size, self._stream.address)
        self._sources.append(source)

    def read(self, tensor: Tensor) -> set[int]:
        """Return the bytes that are there when all that the program has started is done."""
        self.synchronize()
        found = np.empty(tensor.num_bytes, np.uint8)
        self.library.call("copy", address(found), tensor.data_ptr(), ctypes.c_int64(tensor.num_bytes))
        return set(found.tolist())

    def synchronize(self) -> None:
        """Of the program's current stream."""
        self.library.call("stream_synchronize", self._stream.address)
