"""NumPy arrays as Paddle CPU tensors without a copy: one place for what differs between the two."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.base import core

ALIGNMENT = 64  # bytes: one cache line, one vector register
_DTYPES = {
    np.dtype(np.float32): paddle.float32,
    np.dtype(np.uint16): paddle.bfloat16,  # NumPy has no bfloat16: u16 bit patterns
    np.dtype(np.uint8): paddle.uint8,
    np.dtype(np.int32): paddle.int32,
    np.dtype(np.int64): paddle.int64,
    np.dtype(np.uint64): paddle.uint64,
}


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return zeros at a 64-byte aligned address; the system provides the memory page by page as it is first touched."""
    count, item = math.prod(shape), np.dtype(dtype).itemsize
    raw = np.zeros(count * item + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + count * item].view(dtype).reshape(shape)


def from_numpy(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor over the array's memory; u16 is taken as bfloat16. The tensor keeps the array alive.

    While the tensor lives, the same memory must not be wrapped again: Paddle keeps one deleter per address.

    Raises:
        ValueError: not C-contiguous, or of another dtype than f32, u16, u8, i32, i64, u64.
    """
    if array.dtype not in _DTYPES or not array.flags.c_contiguous:
        raise ValueError(f"array: expected contiguous f32, u16, u8, i32, i64 or u64, got {array.dtype}{array.shape}")
    if array.size == 0:
        return paddle.empty(array.shape, dtype=_DTYPES[array.dtype])
    flat = core.frombuffer(array.reshape(-1).view(np.uint8), dtype=_DTYPES[array.dtype])
    return flat if array.ndim == 1 else flat.reshape(array.shape)  # 10 us, and most arrays are columns
