"""pack_linear and linear on NumPy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.library import CParams, call, library
from fastdeploy_sd.ops.native.arrays import DTYPE_CODES, Array, dtype_code, pointer
from fastdeploy_sd.ops.native.memory import WeightMemory
from fastdeploy_sd.ops.reference.linear import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.weight_matrix import WeightMatrix, WeightPart
from fastdeploy_sd.types import F32

# fdsd::WeightDType.
_WEIGHT_DTYPE_CODES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}


class WeightRows(CParams):
    """Twin of fdsd::WeightRows."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("is_transposed", ctypes.c_int32),
    )


class PackLinearParams(CParams):
    """Twin of fdsd::PackLinearParams."""

    _fields_ = (
        ("in_features", ctypes.c_int32),
        ("out_features", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("num_parts", ctypes.c_int32),
        ("parts", ctypes.POINTER(WeightRows)),
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


def packed_bytes(in_features: int, out_features: int, fmt: LinearFormat) -> int:
    """Return the size of a packed [out_features, in_features] matrix; a multiple of 64."""
    function = library().fdsd_packed_linear_bytes
    function.restype = ctypes.c_int64
    return int(function(in_features, out_features, format_code(fmt)))


def pack_into(address: int, weight: Array | WeightMatrix, fmt: LinearFormat) -> None:
    """Pack a matrix into `packed_bytes` bytes of memory at a 64-byte aligned address.

    Args:
        weight: f32, f16 or bf16 [N, K], or parts of it; C-contiguous; may be read-only memory maps.

    Raises:
        ValueError: a shape, dtype or the alignment disagrees.
    """
    matrix = as_matrix(weight)
    out_features, in_features = matrix.shape
    parts = (WeightRows * len(matrix.parts))(*map(_weight_rows, matrix.parts))
    params = PackLinearParams(
        in_features, out_features, format_code(fmt), len(matrix.parts), parts, ctypes.c_void_p(address)
    )
    call("pack_linear", params)


def as_matrix(weight: Array | WeightMatrix) -> WeightMatrix:
    """Return an array as a matrix of one part."""
    return weight if isinstance(weight, WeightMatrix) else WeightMatrix.whole(weight)


def _weight_rows(part: WeightPart) -> WeightRows:
    data = part.data
    if data.dtype not in _WEIGHT_DTYPE_CODES:
        raise ValueError(f"weight: expected float32, float16 or bfloat16 (as uint16), got {data.dtype}")
    address = pointer("weight", data, data.shape, data.dtype)
    return WeightRows(address, part.shape[0], _WEIGHT_DTYPE_CODES[data.dtype], part.is_transposed)


def pack_linear(weight: Array | WeightMatrix, fmt: LinearFormat) -> PackedLinear:
    """Quantise and reorder a weight matrix; see `reference.linear.stored_weight` for its values.

    Args:
        weight: f32, f16 or bf16 [N, K], or parts of it.

    Raises:
        ValueError: unknown format, or a shape or dtype disagrees.
    """
    matrix = as_matrix(weight)
    out_features, in_features = matrix.shape
    data = WeightMemory().take(packed_bytes(in_features, out_features, fmt))
    pack_into(data.ctypes.data, matrix, fmt)
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
        pointer(
            "packed", packed.data, (packed_bytes(packed.in_features, packed.out_features, packed.format),), np.uint8
        ),
        pointer("bias", bias, (packed.out_features,), np.float32),
        pointer("y", y, y.shape, y.dtype),
    )
    call("linear", params)
    return y
