"""Meaning of the int8 KV cache: how the head of a token's key or value becomes integers and a scale."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.runtime.arrays import Array
from fastdeploy_sd.types import F32, I8

INT8_MAX = np.float32(127.0)
# Heads whose largest magnitude is below this become zero: their scale would leave float32's normal range.
TINY_MAGNITUDE = np.float32(1e-30)


def quantize_heads(x: F32) -> tuple[I8, F32]:
    """Round every head to 127ths of its largest magnitude, ties to even.

    A head that holds an infinity or a NaN gets integers of zero and the scale NaN: who attends to it gets NaN, as
    without quantisation, and nothing is clipped.

    Args:
        x: f32[..., D].

    Returns:
        (integers i8[..., D] in -127..127, scales f32[...]); an integer times its scale is about its value.
    """
    largest = np.max(np.abs(x), axis=-1)
    is_finite = np.isfinite(largest)
    has_scale = is_finite & (largest >= TINY_MAGNITUDE)
    inverse = INT8_MAX / np.where(has_scale, largest, INT8_MAX)
    integers = np.rint(np.where(has_scale[..., None], x, np.float32(0.0)) * inverse[..., None])
    scales = np.where(has_scale, largest / INT8_MAX, np.where(is_finite, np.float32(0.0), np.float32(np.nan)))
    return integers.astype(np.int8), scales.astype(np.float32)


def dequantize_heads(integers: Array, scales: Array) -> F32:
    """Return the values f32[..., D] that integers i8[..., D] with scales f32[...] stand for."""
    return np.asarray(integers, np.float32) * np.asarray(scales, np.float32)[..., None]
