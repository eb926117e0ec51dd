"""Memory of a GPU and pinned memory of the host. A piece is given back when nothing over it is left.

The driver allocates slowly and rounds sizes up, so small requests are cut out of larger pieces. Freed memory is not
cut up again: small allocations live as long as the server.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.cuda.handles import new_event
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.memory import DeviceMemory

ALIGNMENT = 256


class Allocator:
    """Where a GPU's memory comes from: the driver."""

    def __init__(self, library: CudaLibrary) -> None:
        self.library = library

    @property
    def text(self) -> str:
        """What it is, for people."""
        return "taken from the driver"

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Return memory with anything in it, at a multiple of 256, that nothing under way uses.

        Raises MemoryError: the GPU has not that much.
        """
        try:
            address = self.library.made("allocate", ctypes.c_int64(num_bytes))
        except ValueError as error:
            raise self.shortage(num_bytes, error) from None
        return DeviceMemory(address, num_bytes, functools.partial(self.library.discard, "free"))

    def total_and_free(self) -> tuple[int, int]:
        """Return the bytes of the GPU, and how many of them `allocate` may still give."""
        return self.library.memory_bytes()

    def shortage(self, num_bytes: int, error: Exception) -> MemoryError:
        """Return what `allocate` raises."""
        _, free = self.library.memory_bytes()
        return MemoryError(f"{num_bytes} bytes of the GPU's memory, of which {free} are free: {error}")


class CudaMemory:
    """Hands out a GPU's memory; of the emulated one every request gets a piece of its own, whose ends are watched."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self._library = allocator.library
        self._piece: DeviceMemory | None = None
        self._used = 0

    def take(self, num_bytes: int) -> tuple[DeviceMemory, int]:
        """Return memory and an address in it, a multiple of 256, from which on num_bytes are the caller's.

        What is there is anything. The caller keeps the memory for as long as the GPU may use it. Raises MemoryError:
        the GPU has not that much; the text says how much it has.
        """
        piece_bytes = self._library.piece_bytes
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if 4 * size > piece_bytes:
            memory = self.allocator.allocate(num_bytes)
            return memory, memory.address
        if self._piece is None or self._used + size > piece_bytes:
            self._piece, self._used = self.allocator.allocate(piece_bytes), 0
        address = self._piece.address + self._used
        self._used += size
        return self._piece, address


def pinned_zeros(library: CudaLibrary, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros u8[num_bytes] of the host that a GPU copies from and to by itself.

    Raises MemoryError: the system gives no more of such memory.
    """
    try:
        address = library.made("allocate_pinned", ctypes.c_int64(num_bytes))
    except ValueError as error:
        raise MemoryError(f"{num_bytes} bytes of pinned memory: {error}") from None
    raw: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    raw.memory = DeviceMemory(address, num_bytes, functools.partial(library.discard, "free_pinned"))  # kept alive
    array: npt.NDArray[np.uint8] = np.frombuffer(raw, np.uint8)
    array[:] = 0
    return array


class StagingMemory:
    """Pinned memory of the host and as much of the GPU's, for uploads.

    Attributes:
        host: u8[num_bytes], pinned.
        event: the user records it after each use of the memory, and waits for it before the next.
    """

    def __init__(self, library: CudaLibrary, memory: CudaMemory, num_bytes: int) -> None:
        self.host = pinned_zeros(library, num_bytes)
        self.memory, self.address = memory.take(num_bytes)
        self.event = new_event(library)
