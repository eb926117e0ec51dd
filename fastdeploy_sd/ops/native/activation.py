"""swiglu on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, dtype_code, pointer


class SwigluParams(CParams):
    """Twin of fdsd::SwigluParams."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("gate_up", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


def swiglu(gate_up: Array) -> Array:
    """See `reference.activation.swiglu`.

    Raises:
        ValueError: an odd number of columns, or a dtype other than float32 and bfloat16 bits.
    """
    rows, width = gate_up.shape
    if width % 2 != 0:
        raise ValueError(f"gate_up: expected an even number of columns, got {width}")
    y = np.empty((rows, width // 2), gate_up.dtype)
    params = SwigluParams(
        rows,
        width // 2,
        dtype_code("gate_up", gate_up),
        pointer("gate_up", gate_up, (rows, width), gate_up.dtype),
        pointer("y", y, y.shape, y.dtype),
    )
    call("swiglu", params)
    return y
