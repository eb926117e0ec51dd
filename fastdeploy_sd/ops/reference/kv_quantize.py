"""Meaning of KV caches of bytes: how the head of a token's key or value becomes int8 or float8 elements and a scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.types import F32, I8, U8

INT8_MAX = np.float32(127.0)
# Heads whose largest magnitude is below this become zero: their scale would leave float32's normal range.
TINY_MAGNITUDE = np.float32(1e-30)


def quantize_heads(x: F32) -> tuple[I8, F32]:
    """Round every head f32[..., D] to 127ths of its largest magnitude, ties to even.

    A head that holds an infinity or a NaN gets integers of zero and the scale NaN: who attends to it gets NaN, as
    without quantisation, and nothing is clipped.

    Returns:
        (integers i8[..., D] in -127..127, scales f32[...]); an integer times its scale is about its value.
    """
    scaled, scales, _ = _scaled(x, INT8_MAX)
    return np.rint(scaled).astype(np.int8), scales


def _scaled(x: F32, most: np.float32) -> tuple[F32, F32, npt.NDArray[np.bool_]]:
    """Return the heads with `most` as their largest magnitude, their scales, and which of them have one."""
    largest = np.max(np.abs(x), axis=-1)
    is_finite = np.isfinite(largest)
    has_scale = is_finite & (largest >= TINY_MAGNITUDE)
    inverse = most / np.where(has_scale, largest, most)
    scaled = np.where(has_scale[..., None], x, np.float32(0.0)) * inverse[..., None]
    scales = np.where(has_scale, largest / most, np.where(is_finite, np.float32(0.0), np.float32(np.nan)))
    return np.asarray(scaled, np.float32), scales.astype(np.float32), has_scale


def float8_values() -> F32:
    """Return what each of the 256 bit patterns of e4m3 stands for, f32[256].

    A sign, 4 bits of exponent with bias 7, 3 of mantissa. Exponent 0 has no leading 1; there is no infinity, and all
    bits but the sign are NaN.

    Source: arXiv:2209.05433, table 1.
    """
    values = []
    for pattern in range(256):
        exponent, mantissa = pattern >> 3 & 15, pattern & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(-magnitude if pattern >> 7 else magnitude)
    found = np.array(values, np.float32)
    found[127::128] = np.nan
    return found


FLOAT8_VALUES = float8_values()
FLOAT8_MAX = FLOAT8_VALUES[126]


def quantize_heads_float8(x: F32) -> tuple[U8, F32]:
    """Scale every head so that its largest magnitude is float8's, and round to the nearest one, ties to even.

    Heads that are not finite, or tiny, are treated as by `quantize_heads`.

    Returns:
        (bits u8[..., D], scales f32[...]); an element times its scale is about its value.
    """
    scaled, scales, has_scale = _scaled(x, FLOAT8_MAX)
    magnitude, values = np.abs(scaled).astype(np.float64), FLOAT8_VALUES[:127].astype(np.float64)
    above = np.clip(np.searchsorted(values, magnitude), 1, 126)
    to_lower, to_upper = magnitude - values[above - 1], values[above] - magnitude
    # Neighbours' patterns follow one another: the even one ends in 0.
    is_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (above % 2 == 1))
    bits = np.where(is_lower, above - 1, above) | np.where(np.signbit(scaled), 128, 0)
    # A head without a scale is all zeros, without signs.
    return np.where(has_scale[..., None], bits, 0).astype(np.uint8), scales


def dequantize_heads(elements: Array, scales: Array) -> F32:
    """Return the values f32[..., D] that i8 or float8 elements [..., D] with scales f32[...] stand for."""
    values = FLOAT8_VALUES[elements] if elements.dtype == np.uint8 else np.asarray(elements, np.float32)
    return np.asarray(values * np.asarray(scales, np.float32)[..., None], np.float32)
