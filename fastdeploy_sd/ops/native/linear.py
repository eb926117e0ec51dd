"""pack_linear and linear on NumPy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.library import CParams, call, library
from fastdeploy_sd.ops.native.arrays import DTYPE_CODES, Array, dtype_code, pointer
from fastdeploy_sd.ops.reference.linear import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.types import F32

ALIGNMENT = 64


class PackLinearParams(CParams):
    """Twin of fdsd::PackLinearParams."""

    _fields_ = (
        ("in_features", ctypes.c_int32),
        ("out_features", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
    )


class LinearParams(CParams):
    """Twin of fdsd::LinearParams."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("in_features", ctypes.c_int32),
        ("out_features", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class PackedLinear:
    """A weight matrix in the layout the kernel streams.

    Attributes:
        data: u8[packed_bytes(...)], 64-byte aligned.
    """

    data: npt.NDArray[np.uint8]
    in_features: int
    out_features: int
    format: LinearFormat


def format_code(fmt: str) -> int:
    """Return the LinearFormat code of a format name.

    Raises:
        ValueError: unknown name.
    """
    if fmt not in LINEAR_FORMATS:
        raise ValueError(f"format: expected one of {', '.join(LINEAR_FORMATS)}, got {fmt!r}")
    return LINEAR_FORMATS.index(fmt)


def matrix_shape(weight: Array) -> tuple[int, int]:
    """Return (out_features, in_features).

    Raises:
        ValueError: not a matrix.
    """
    if weight.ndim != 2:  # noqa: PLR2004
        raise ValueError(f"weight: expected [N, K], got shape {list(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def packed_bytes(in_features: int, out_features: int, fmt: LinearFormat) -> int:
    """Return the size of a packed [out_features, in_features] matrix; a multiple of 64."""
    function = library().fdsd_packed_linear_bytes
    function.restype = ctypes.c_int64
    return int(function(in_features, out_features, format_code(fmt)))


def aligned_bytes(count: int) -> npt.NDArray[np.uint8]:
    """Return an uninitialised u8[count] whose address is a multiple of 64."""
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]


def pack_into(address: int, weight: Array, fmt: LinearFormat) -> None:
    """Pack a matrix into `packed_bytes` bytes of memory at a 64-byte aligned address.

    Args:
        weight: f32 or bf16 [N, K], C-contiguous; may be a read-only memory map.

    Raises:
        ValueError: a shape, dtype or the alignment disagrees.
    """
    out_features, in_features = matrix_shape(weight)
    params = PackLinearParams(
        in_features,
        out_features,
        format_code(fmt),
        dtype_code("weight", weight),
        pointer("weight", weight, weight.shape, weight.dtype),
        ctypes.c_void_p(address),
    )
    call("pack_linear", params)


def pack_linear(weight: Array, fmt: LinearFormat) -> PackedLinear:
    """Quantise and reorder a weight matrix; see `reference.linear.stored_weight` for its values.

    Args:
        weight: f32 or bf16 [N, K].

    Raises:
        ValueError: unknown format, or a shape or dtype disagrees.
    """
    out_features, in_features = matrix_shape(weight)
    data = aligned_bytes(packed_bytes(in_features, out_features, fmt))
    pack_into(data.ctypes.data, weight, fmt)
    return PackedLinear(data, in_features, out_features, fmt)


def linear(x: Array, packed: PackedLinear, bias: F32 | None = None, out_dtype: npt.DTypeLike | None = None) -> Array:
    """See `reference.linear.linear`.

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    rows = x.shape[0]
    y = np.empty((rows, packed.out_features), x.dtype if out_dtype is None else out_dtype)
    params = LinearParams(
        rows,
        packed.in_features,
        packed.out_features,
        format_code(packed.format),
        dtype_code("x", x),
        DTYPE_CODES[y.dtype],
        pointer("x", x, (rows, packed.in_features), x.dtype),
        pointer("packed", packed.data, packed.data.shape, np.uint8),
        pointer("bias", bias, (packed.out_features,), np.float32),
        pointer("y", y, y.shape, y.dtype),
    )
    call("linear", params)
    return y
