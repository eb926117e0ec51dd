"""Memory of GPUs that processes of one host share, and how many GPUs there are. Knows no tensors and no ranks.

Every function raises ValueError where the driver or the system refuses.
"""

from __future__ import annotations

import ctypes
import functools

from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.memory import DeviceMemory


def num_devices(library: CudaLibrary) -> int:
    """Return how many GPUs this process sees."""
    count = ctypes.c_int64()
    library.call("num_devices", ctypes.byref(count))
    return count.value


def reaches(library: CudaLibrary, device: int, other: int) -> bool:
    """Return whether a GPU can read and write another one's memory, both by their numbers."""
    can_access = ctypes.c_int64()
    library.call("reaches", ctypes.c_int32(device), ctypes.c_int32(other), ctypes.byref(can_access))
    return can_access.value != 0


def take_shareable(library: CudaLibrary, num_bytes: int) -> DeviceMemory:
    """Return memory that `handle_of` can give to other processes; nothing else is in the blocks that it has of CUDA's.

    What is there is anything. It must live for longer than any process uses it.
    """
    block = library.number("share_block_bytes")
    size = -(-num_bytes // block) * block
    address = library.made("allocate", ctypes.c_int64(size))
    return DeviceMemory(address, size, functools.partial(library.discard, "free"))


def handle_of(library: CudaLibrary, memory: DeviceMemory) -> bytes:
    """Return what `open_shared` in another process of this host takes for such memory."""
    handle = ctypes.create_string_buffer(library.number("share_handle_bytes"))
    library.call("share", memory.address, handle)
    return handle.raw


def open_shared(library: CudaLibrary, handle: bytes, num_bytes: int) -> DeviceMemory:
    """Return another process's memory by its `handle_of`; it is closed when nothing over it is left.

    Raises ValueError: no handle, one of this process or an ended one, or of a GPU that this one cannot reach.
    """
    if len(handle) != library.number("share_handle_bytes"):
        raise ValueError(f"handle: expected {library.number('share_handle_bytes')} bytes, got {len(handle)}")
    address = library.made("open_shared", handle)
    return DeviceMemory(address, num_bytes, functools.partial(library.discard, "close_shared"))


def open_verified(library: CudaLibrary, handle: bytes, num_bytes: int) -> DeviceMemory:
    """As `open_shared`, of a process that may say less than the truth.

    Raises ValueError: as `open_shared`; or there are fewer bytes, or the driver does not say how many.
    """
    memory, found = open_shared(library, handle, num_bytes), ctypes.c_int64()
    library.call("allocation_bytes", memory.address, ctypes.byref(found))
    if found.value < num_bytes:
        raise ValueError(f"handle: expected one of {num_bytes} bytes, got one of {found.value}")
    return memory
