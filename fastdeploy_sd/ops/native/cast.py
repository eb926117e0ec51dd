"""cast on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, dtype_code, pointer


class CastParams(CParams):
    """Twin of fdsd::CastParams."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


def cast(x: Array, dtype: npt.DTypeLike) -> Array:
    """See `reference.cast.cast`.

    Raises:
        ValueError: x is not a contiguous matrix, or a dtype is neither float32 nor bfloat16 bits.
    """
    rows, columns = x.shape
    y = np.empty((rows, columns), dtype)
    params = CastParams(
        rows,
        columns,
        dtype_code("x", x),
        dtype_code("y", y),
        pointer("x", x, (rows, columns), x.dtype),
        pointer("y", y, y.shape, y.dtype),
    )
    call("cast", params)
    return y
