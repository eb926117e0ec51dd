"""Meaning of pack_linear and linear: what each weight format stores and what is multiplied."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.bf16 import from_bf16, narrow, to_bf16, widen
from fastdeploy_sd.ops.native.arrays import Array
from fastdeploy_sd.types import F32

LinearFormat = Literal["float32", "bfloat16", "wint8", "wint4"]
LINEAR_FORMATS: tuple[LinearFormat, ...] = get_args(LinearFormat)
I8 = npt.NDArray[np.int8]

QUANT_GROUP = 128
# Groups whose largest magnitude is smaller are zero: their scale would leave float32's normal range.
TINY_GROUP = 1e-30
MAX_INT = {"wint8": 127, "wint4": 7}


def quantize_rows(x: F32, max_int: int = 127) -> tuple[I8, F32]:
    """Quantise each row in groups of 128 columns, symmetrically: q = round(x / scale), ties to even.

    A group that holds an infinity or a NaN gets q = 0 and scale = NaN, so whatever reads it becomes NaN.

    Args:
        x: f32[rows, K]; the last group is padded with zeros.
        max_int: q is in [-max_int, max_int].

    Returns:
        q i8[rows, groups, 128] and scale f32[rows, groups] = max|x| / max_int.
    """
    rows, width = x.shape
    groups = -(-width // QUANT_GROUP)
    values = np.zeros((rows, groups * QUANT_GROUP), np.float32)
    values[:, :width] = x
    values = values.reshape(rows, groups, QUANT_GROUP)
    is_finite = np.isfinite(values).all(axis=-1)
    largest = np.abs(np.where(is_finite[..., None], values, np.float32(0))).max(axis=-1)
    is_scaled = is_finite & (largest >= np.float32(TINY_GROUP))
    safe = np.where(is_scaled, largest, np.float32(1))
    scale = np.where(is_scaled, safe / np.float32(max_int), np.where(is_finite, np.float32(0), np.float32(np.nan)))
    inverse = np.float32(max_int) / safe
    q = np.rint(np.where(is_scaled[..., None], values, np.float32(0)) * inverse[..., None])
    return q.astype(np.int8), scale


def dequantize_rows(q: I8, scale: F32, width: int) -> F32:
    """Return q * scale as f32[rows, width]."""
    rows, groups, group = q.shape
    return (q * scale[..., None]).astype(np.float32).reshape(rows, groups * group)[:, :width]


def stored_weight(weight: Array, fmt: LinearFormat) -> F32:
    """Return the values a weight has once stored in a format, f32[N, K].

    wint8 and wint4 have one scale per output and group of 128 inputs.

    Args:
        weight: f32 or bf16 [N, K].
    """
    w = widen(weight)
    if fmt == "float32":
        return w
    if fmt == "bfloat16":
        return from_bf16(to_bf16(w))
    return dequantize_rows(*quantize_rows(w, MAX_INT[fmt]), w.shape[1])


def read_input(x: Array, fmt: LinearFormat) -> F32:
    """Return the values of x that a format multiplies, f32[M, K].

    float32 takes x as it is, bfloat16 rounds it, the int formats quantise it to int8 per row and group of 128.
    """
    values = widen(x)
    if fmt == "float32":
        return values
    if fmt == "bfloat16":
        return from_bf16(to_bf16(values))
    return dequantize_rows(*quantize_rows(values), values.shape[1])


def linear(
    x: Array, weight: Array, fmt: LinearFormat, bias: F32 | None = None, out_dtype: npt.DTypeLike | None = None
) -> Array:
    """y = x . weight^T (+ bias), with x and weight as the format keeps them.

    Args:
        x: f32 or bf16 [M, K].
        weight: f32 or bf16 [N, K], not yet in the format.
        bias: f32[N].
        out_dtype: float32 or uint16 (bf16 bits); None is x's dtype.

    Returns:
        y [M, N].
    """
    with np.errstate(invalid="ignore"):  # an input may hold infinities and NaNs
        y = read_input(x, fmt).astype(np.float64) @ stored_weight(weight, fmt).astype(np.float64).T
    if bias is not None:
        y = y + bias
    return narrow(y.astype(np.float32), x.dtype if out_dtype is None else out_dtype)
