"""The KV of ranks that have a GPU each, in memory that rank 0 reaches: it copies blocks of the whole model.

As with kv_file.py, every rank computes the same layout from the same sizes; ranks exchange only a handle.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.sharing import handle_of, open_shared, take_shareable
from fastdeploy_sd.device.device_tensor import DeviceTensor, element_of
from fastdeploy_sd.device.memory import DeviceMemory
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

# Of the begin of a piece, in bytes.
_ALIGNMENT = 256


class GpuKv:
    """Hands out a rank's memory piece by piece. Two processes that ask for the same pieces get the same memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self._used = memory, 0

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return the next piece, which the rank has filled with zeros; it keeps the memory."""
        piece = DeviceTensor(self._memory, self._memory.address + self._used, element_of(dtype), shape)
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def share_gpu_kv(device: CudaDevice, group: RankGroup, sizes: Sequence[int]) -> Mapping[int, GpuKv]:
    """Return this rank's memory for KV, and on rank 0 that of all ranks. All ranks call it.

    `sizes`: bytes, by rank. Raises MemoryError: the GPU has too little memory, or cannot share it.
    """
    library = device.library
    try:
        own = take_shareable(library, sizes[group.rank])
        library.call("zero", own.address, ctypes.c_int64(sizes[group.rank]), device.stream)
        library.call("stream_synchronize", device.stream)  # rank 0 sees zeros
        handles = group.exchange(handle_of(library, own))
        memory = {group.rank: own}
        if group.rank == 0:
            memory |= {
                rank: open_shared(library, handle, sizes[rank]) for rank, handle in enumerate(handles) if rank > 0
            }
    except ValueError as error:
        raise MemoryError(f"{sizes[group.rank]} bytes of a GPU's memory that rank 0 reaches: {error}") from None
    return {rank: GpuKv(found) for rank, found in memory.items()}
