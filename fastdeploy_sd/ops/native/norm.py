"""rms_norm and concat_rms_norm on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, dtype_code, pointer
from fastdeploy_sd.types import F32


class RmsNormParams(CParams):
    """Twin of fdsd::RmsNormParams."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("residual_out", ctypes.c_void_p),
    )


class ConcatRmsNormParams(CParams):
    """Twin of fdsd::ConcatRmsNormParams."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("first_weight", ctypes.c_void_p),
        ("second_weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


def rms_norm(x: Array, weight: F32, eps: float, residual: F32 | None = None) -> tuple[Array, F32]:
    """See `reference.norm.rms_norm`.

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    rows, hidden = x.shape
    y, residual_out = np.empty_like(x), np.empty((rows, hidden), np.float32)
    params = RmsNormParams(
        rows,
        hidden,
        dtype_code("x", x),
        eps,
        pointer("x", x, (rows, hidden), x.dtype),
        pointer("residual", residual, (rows, hidden), np.float32),
        pointer("weight", weight, (hidden,), np.float32),
        pointer("y", y, (rows, hidden), x.dtype),
        pointer("residual_out", residual_out, (rows, hidden), np.float32),
    )
    call("rms_norm", params)
    return y, residual_out


def concat_rms_norm(first: Array, second: Array, first_weight: F32, second_weight: F32, eps: float) -> Array:
    """See `reference.norm.concat_rms_norm`.

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    rows, hidden = first.shape
    y = np.empty((rows, 2 * hidden), first.dtype)
    params = ConcatRmsNormParams(
        rows,
        hidden,
        dtype_code("first", first),
        eps,
        pointer("first", first, (rows, hidden), first.dtype),
        pointer("second", second, (rows, hidden), first.dtype),
        pointer("first_weight", first_weight, (hidden,), np.float32),
        pointer("second_weight", second_weight, (hidden,), np.float32),
        pointer("y", y, y.shape, first.dtype),
    )
    call("concat_rms_norm", params)
    return y
