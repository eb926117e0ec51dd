"""Large pieces of memory of the host or a device: packed weights, KV cache, arenas. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np

from fastdeploy_sd.types import Bytes

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
_ALIGNMENT = 4096
_MAP_FIXED, _MADV_COLLAPSE = 16, 25
_FALLOC_PUNCH_HOLE = 3  # and keep the size
_FAILED = ctypes.c_void_p(-1).value


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
    return _aligned(memory, num_bytes)


def whole_huge_pages(num_bytes: int) -> int:
    """Return the bytes of the fewest huge pages that hold so many."""
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _aligned(memory: mmap.mmap, num_bytes: int) -> Bytes:
    """Return u8[num_bytes] of mapped memory, which has a huge page more, at a multiple of 2 MiB."""
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[begin : begin + num_bytes]


def map_file(file: int, begin: int, num_bytes: int, *, is_writable: bool = False) -> Bytes:
    """Return u8[num_bytes] at a multiple of 2 MiB: the bytes of a file from `begin` on, shared with all who map them.

    They are in huge pages where the file has them at multiples of 2 MiB. `begin`: a multiple of 4096. Raises OSError.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    # Python maps at no address of one's choice, but gives all of this back.
    room = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=access)
    memory = _aligned(room, num_bytes)
    where = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(num_bytes)
    if libc().mmap(*where, access, mmap.MAP_SHARED | _MAP_FIXED, file, ctypes.c_long(begin)) == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap: {os.strerror(error)}")
    libc().madvise(*where, mmap.MADV_HUGEPAGE)
    return memory


def make_huge(memory: Bytes) -> None:
    """Give untouched memory that `map_file` has mapped its pages now: huge ones, where the system has them.

    They come from the memory node of this thread. Linux 6.1 and later do so whatever their default for shared memory.
    """
    memory[::HUGE_PAGE_BYTES] = 0  # a huge page comes from the node of what was there
    libc().madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), _MADV_COLLAPSE)


def punch(file: int, begin: int, num_bytes: int) -> None:
    """Give back the memory of whole pages of a file in memory, which are zeros from now on; raises OSError."""
    if libc().fallocate(file, _FALLOC_PUNCH_HOLE, ctypes.c_long(begin), ctypes.c_long(num_bytes)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"fallocate: {os.strerror(error)}")


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library, whose error number `ctypes.get_errno` returns."""
    found = ctypes.CDLL(None, use_errno=True)
    found.syscall.restype, found.mmap.restype = ctypes.c_long, ctypes.c_void_p
    return found
