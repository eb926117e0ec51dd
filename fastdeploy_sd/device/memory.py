"""Large pieces of memory of the host or a device: packed weights, KV cache, arenas. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable

import numpy as np

from fastdeploy_sd.types import Bytes

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
_ALIGNMENT = 4096


class DeviceMemory:
    """A piece of memory whose address is given back when nothing over it is left."""

    __slots__ = ("__weakref__", "address", "num_bytes")

    def __init__(self, address: int, num_bytes: int, give_back: Callable[[int], object]) -> None:
        self.address, self.num_bytes = address, num_bytes
        weakref.finalize(self, give_back, address).atexit = False  # what a process has, its end gives back


class WeightMemory:
    """Hands out zeros that lie close together, in huge pages where the system has them.

    A step reads every weight once. With pages of 4 KiB the processor spends a quarter of that time on their addresses.
    The system provides a page when it is first written, so by the thread that packs it; nothing is given back before
    the last array over a chunk is gone.
    """

    def __init__(self) -> None:
        self._rest: Bytes = np.zeros(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """Return u8[num_bytes] at a multiple of 4096."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._rest):
            self._rest = huge_pages(max(size, CHUNK_BYTES))
        taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken


def huge_pages(num_bytes: int) -> Bytes:
    """Return zeros u8[num_bytes] at a multiple of 2 MiB, in huge pages where the system has them.

    The system provides a page when it is first touched. Where it refuses the advice, pages are small.
    """
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[begin : begin + num_bytes]
