"""NumPy arrays as Paddle CPU tensors without a copy: one place for what differs between the two."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.base import core

from fastdeploy_sd.device.memory import HUGE_PAGE_BYTES, huge_pages
from fastdeploy_sd.device.memory_nodes import spread

ALIGNMENT = 64  # bytes: one cache line, one vector register
_DTYPES = {
    np.dtype(np.float32): paddle.float32,
    np.dtype(np.uint16): paddle.bfloat16,  # NumPy has no bfloat16: u16 bit patterns
    np.dtype(np.float16): paddle.float16,
    np.dtype(np.int8): paddle.int8,
    np.dtype(np.uint8): paddle.uint8,
    np.dtype(np.int32): paddle.int32,
    np.dtype(np.int64): paddle.int64,
}


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return zeros at a 64-byte aligned address; the system provides the memory page by page as it is first touched.

    Large memory is spread over the memory nodes that kernel threads run on.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes >= HUGE_PAGE_BYTES:
        return spread(huge_pages(num_bytes)).view(dtype).reshape(shape)
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + num_bytes].view(dtype).reshape(shape)


def from_numpy(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor over the array's memory; u16 is taken as bfloat16. The tensor keeps the array alive.

    While the tensor lives, the same memory must not be wrapped again: Paddle keeps one deleter per address. Raises
    ValueError: not C-contiguous, or of another dtype than f32, u16, f16, i8, u8, i32, i64.
    """
    if array.dtype not in _DTYPES or not array.flags.c_contiguous:
        raise ValueError(
            f"array: expected contiguous f32, u16, f16, i8, u8, i32 or i64, got {array.dtype}{array.shape}"
        )
    if array.size == 0:
        return paddle._C_ops.empty(array.shape, _DTYPES[array.dtype], paddle.CPUPlace())  # whatever set_device says
    flat = core.frombuffer(array.reshape(-1).view(np.uint8), dtype=_DTYPES[array.dtype])
    return flat if array.ndim == 1 else flat.reshape(array.shape)  # 10 us, and most arrays are columns


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return an array over a CPU tensor's memory, in 3 us; `Tensor.numpy` copies. The array keeps the tensor alive.

    Raises RuntimeError: a type NumPy lacks, such as bfloat16; BufferError: the tensor wants a gradient.
    """
    array: npt.NDArray[Any] = np.from_dlpack(tensor)
    return array
