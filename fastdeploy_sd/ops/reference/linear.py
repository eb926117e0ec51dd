"""Meaning of pack_linear, linear, head_linear and gather_columns: what formats store and what is multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, storage, to_bf16, widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types import F32, I8, I32
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

QUANT_GROUP = 128
# Groups whose largest magnitude is smaller are zero: their scale would leave float32's normal range.
TINY_GROUP = np.float32(1e-30)
# What the smallest scale of wint4 that clips nothing is multiplied by; inputs that share a factor.
INT4_STRETCHES = (1.0, 1.06, 1.13)
INT4_INPUTS = 16
# Of e4m3, the 8-bit float: its largest number, its smallest exponent, the bits of its fraction.
E4M3_MAX = np.float32(448)
E4M3_MIN_EXPONENT = -6
E4M3_FRACTION_BITS = 3


def _groups(x: F32) -> F32:
    """f32[rows, K] as f32[rows, groups, 128], padded with zeros."""
    rows, width = x.shape
    groups = -(-width // QUANT_GROUP)
    values = np.zeros((rows, groups * QUANT_GROUP), np.float32)
    values[:, :width] = x
    return values.reshape(rows, groups, QUANT_GROUP)


def _peaks(values: F32) -> tuple[F32, F32, npt.NDArray[np.bool_]]:
    """Return (values, peak, has_scale) with values and peak made harmless (0 and 1) where a group has no scale."""
    is_finite = np.isfinite(values).all(axis=-1)
    first = np.abs(values).argmax(axis=-1)
    peak = np.take_along_axis(values, first[..., None], axis=-1)[..., 0]
    has_scale = is_finite & (np.abs(peak) >= TINY_GROUP)
    safe = np.where(has_scale[..., None], values, np.float32(0))
    return safe, np.where(has_scale, peak, np.float32(1)), has_scale


def _scales(scale: F32, values: F32, has_scale: npt.NDArray[np.bool_]) -> F32:
    """0 for a group that is (nearly) zero, NaN for one that holds an infinity or a NaN."""
    without = np.where(np.isfinite(values).all(axis=-1), np.float32(0), np.float32(np.nan))
    return np.where(has_scale, scale, without)


def quantize_int8(x: F32) -> tuple[I8, F32]:
    """Quantise each row in groups of 128 columns: q = round(x / scale), ties to even, scale = max|x| / 127.

    A group that holds an infinity or a NaN gets q = 0 and scale = NaN, so whatever reads it becomes NaN. The last group
    of x f32[rows, K] is padded with zeros; q is i8[rows, groups, 128], scale f32[rows, groups].
    """
    values = _groups(x)
    safe, peak, has_scale = _peaks(values)
    largest = np.abs(peak)
    inverse = np.float32(127) / largest
    scale = (largest / np.float32(127)).astype(np.float32)
    return np.rint(safe * inverse[..., None]).astype(np.int8), _scales(scale, values, has_scale)


def quantize_int4(x: F32) -> tuple[I8, F32]:
    """Like quantize_int8 with q = factor * (code - zero), |q| <= 127, where 16 columns share a factor and a zero.

    Codes and zeros are from 0 to 15, factors from 1 to 15 and of no common divisor. Of the scales tried the first with
    the least squared error wins, and for each the better of two factors of 16 columns.
    """
    values = _groups(x)
    safe, peak, has_scale = _peaks(values)
    parts = safe.reshape(*peak.shape, QUANT_GROUP // INT4_INPUTS, INT4_INPUTS)
    low, high = np.minimum(parts.min(axis=-1), np.float32(0)), np.maximum(parts.max(axis=-1), np.float32(0))
    ranges = high / np.float32(225) - low / np.float32(225)
    least = np.maximum(np.abs(peak) / np.float32(127), ranges.max(axis=-1))
    best: tuple[F32, ...] = ()
    for stretch in INT4_STRETCHES:
        scale = widen(to_bf16(least * np.float32(stretch)))
        wanted = ((high / scale[..., None] - low / scale[..., None]) / np.float32(15)).astype(np.int32)
        fine, coarse = (_int4_codes(parts, low, scale, wanted + more) for more in (0, 1))
        is_coarse = coarse[0] < fine[0]
        errors, factors = (np.where(is_coarse, *pair) for pair in zip(coarse[:2], fine[:2], strict=True))
        q = np.where(is_coarse[..., None], coarse[2], fine[2])
        found = errors.cumsum(axis=-1, dtype=np.float32)[..., -1], scale, factors, q
        is_better = found[0] < best[0] if best else np.ones(scale.shape, np.bool_)
        best = tuple(
            np.where(is_better.reshape(*is_better.shape, *[1] * (new.ndim - is_better.ndim)), new, old)
            for new, old in zip(found, best or found, strict=True)
        )
    _, scale, factors, q = best
    common = np.gcd.reduce(factors.astype(np.int32), axis=-1)
    scale = (scale * common).astype(np.float32)
    q = np.where(has_scale[..., None, None], q / common[..., None, None], 0)
    return q.astype(np.int8).reshape(values.shape), _scales(scale, values, has_scale)


def _int4_codes(parts: F32, low: F32, scale: F32, wanted: npt.NDArray[np.int32]) -> tuple[F32, F32, F32]:
    """Return the squared errors of each 16 columns, their factors and integers, with about the wanted factors."""
    factor = np.clip(wanted, 1, 15)
    start = -low * (np.float32(1) / (scale[..., None] * factor.astype(np.float32)))
    zero = np.minimum(np.rint(start), 15).astype(np.int32)
    factors = np.minimum(factor, 127 // np.maximum(zero, 15 - zero)).astype(np.float32)
    step, zeros = (scale[..., None] * factors)[..., None], zero.astype(np.float32)[..., None]
    integers = np.clip(np.rint(parts * (np.float32(1) / step)) + zeros, 0, 15) - zeros
    return _sum_of_squares(parts - integers * step), factors, integers * factors[..., None]


def to_e4m3(x: F32) -> F32:
    """Round to the 8-bit float e4m3: to nearest, ties to even. Magnitudes below 464, finite."""
    exponent = np.maximum(np.frexp(x)[1] - 1, E4M3_MIN_EXPONENT)
    step = np.ldexp(np.float32(1), exponent - E4M3_FRACTION_BITS)
    rounded: F32 = (np.rint(x / step) * step).astype(np.float32)
    return rounded


def quantize_fp8(x: F32) -> tuple[F32, F32]:
    """Like quantize_int8 with numbers of e4m3 in [-448, 448], scale = max|x| / 448."""
    values = _groups(x)
    safe, peak, has_scale = _peaks(values)
    largest = np.abs(peak)
    inverse: F32 = (E4M3_MAX / largest).astype(np.float32)
    scale = (largest / E4M3_MAX).astype(np.float32)
    return to_e4m3((safe * inverse[..., None]).astype(np.float32)), _scales(scale, values, has_scale)


def _sum_of_squares(error: F32) -> F32:
    """Sum over 16 columns in the kernel's order, pairs of lanes, so that equal candidates compare alike."""
    lanes = error * error
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def dequantize_rows(q: I8 | F32, scale: F32, width: int) -> F32:
    rows, groups, group = q.shape
    return (q * scale[..., None]).astype(np.float32).reshape(rows, groups * group)[:, :width]


Quantizer = Callable[[F32], tuple[I8 | F32, F32]]
_WEIGHT_QUANTIZERS: Mapping[str, Quantizer] = {
    "wint8": quantize_int8, "wint4": quantize_int4, "fp8": quantize_fp8, "e4m3": quantize_fp8,
}  # fmt: skip
_INPUT_QUANTIZERS: Mapping[str, Quantizer] = {"wint8": quantize_int8, "wint4": quantize_int8, "fp8": quantize_fp8}


def stored_weight(weight: Array, fmt: LinearFormat, slices: SliceRule = WHOLE) -> F32:
    """Return the values a weight [N, K] has once stored in a format, f32[N, K].

    wint8, wint4, fp8 and e4m3 have one scale per output and group of 128 inputs of a slice.
    """
    return _as_read(weight, fmt, _WEIGHT_QUANTIZERS.get(fmt), slices)


def read_input(x: Array, fmt: LinearFormat, slices: SliceRule = WHOLE) -> F32:
    """Return the values of x that a format multiplies, f32[M, K].

    float32 takes x as it is, bfloat16 and float16 round it, e4m3 to bfloat16. The int formats quantise it to int8 per
    row and group of 128 of a slice, fp8 to e4m3.
    """
    return _as_read(x, fmt, _INPUT_QUANTIZERS.get(fmt), slices)


def _as_read(x: Array, fmt: LinearFormat, quantize: Quantizer | None, slices: SliceRule) -> F32:
    """x once it was rounded to a format of floats, or quantised slice by slice."""
    values = widen(x)
    if quantize is None:
        return widen(narrow(values, storage("bfloat16" if fmt == "e4m3" else fmt)))
    parts = [values[:, part.start : part.stop] for part in slices.ranges(values.shape[1])]
    return np.concatenate([dequantize_rows(*quantize(part), part.shape[1]) for part in parts], axis=1)


def linear(
    x: Array,
    weight: Array,
    fmt: LinearFormat,
    bias: F32 | None = None,
    out_dtype: npt.DTypeLike | None = None,
    slices: SliceRule = WHOLE,
) -> Array:
    """y = x . weight^T (+ bias), with x and weight as the format keeps them.

    Args:
        weight: f32, bf16 or f16 [N, K], not yet in the format.
        out_dtype: float32, float16 or uint16 (bf16 bits); None is x's dtype.
        slices: of the sum over K. The sums here are exact, so slices only decide where groups begin.
    """
    with np.errstate(invalid="ignore"):  # an input may hold infinities and NaNs
        y = read_input(x, fmt, slices).astype(np.float64) @ stored_weight(weight, fmt, slices).astype(np.float64).T
    if bias is not None:
        y = y + bias
    return narrow(y.astype(np.float32), x.dtype if out_dtype is None else out_dtype)


def head_linear(x: Array, weights: Array, fmt: LinearFormat, num_rest: int, *, passes: bool) -> Array:
    """y[:, h] = x[:, h] . weight[h]^T of each head; see ops.linear. `weights`: [heads, N, K]."""
    heads = x.reshape(len(x), len(weights), x.shape[1] // len(weights))
    products = [linear(heads[:, h, : weight.shape[1]], weight, fmt) for h, weight in enumerate(weights)]
    y = np.stack(products, axis=1)
    y = np.concatenate([y, heads[:, :, -num_rest:]], axis=2) if passes and num_rest else y
    return y.reshape(len(x), y.shape[1] * y.shape[2])


def gather_columns(x: Array, columns: I32) -> Array:
    """Return columns i32[n] of x [M, K], zeros where a column is -1."""
    found = np.zeros((len(x), len(columns)), x.dtype)
    found[:, columns >= 0] = x[:, columns[columns >= 0]]
    return found
