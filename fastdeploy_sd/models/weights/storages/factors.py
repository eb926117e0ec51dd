"""Scales and zero points of groups as wint4 has them: a scale per 128 inputs times a factor of four bits per 16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.group_format import UNIT
from fastdeploy_sd.ops.packing import FACTOR_INPUTS
from fastdeploy_sd.types import F32, U8

# The largest factor and zero, and what a factor may make of a code at most.
_MAX_FACTOR, _MAX_INT8 = 15, 127


def factors_of(
    groups: Sequence[range], group_size: int, scales: F32, zeros: npt.NDArray[np.int16]
) -> tuple[F32, U8] | None:
    """Return scales f32[N, G] and factors u8[N, G, 8] of wint4, None where those cannot hold a part.

    Args:
        groups: the inputs of each unit of wint4.
        scales, zeros: [N, n] of groups of `group_size` inputs.
    """
    begins = np.array([group.start for group in groups])[:, None]
    ends = np.array([group.stop for group in groups])[:, None]
    own = begins + np.minimum(np.arange(0, UNIT, FACTOR_INPUTS), (ends - begins - 1) // FACTOR_INPUTS * FACTOR_INPUTS)
    firsts, lasts = own // group_size, (np.minimum(own + FACTOR_INPUTS, ends) - 1) // group_size
    if (firsts != lasts).any():
        is_new = [np.diff(values, axis=1, prepend=values[:, :1]) != 0 for values in (scales, zeros)]
        changes = (is_new[0] | is_new[1]).cumsum(axis=1)
        if (changes[:, firsts] != changes[:, lasts]).any():
            return None
    zero = zeros[:, firsts]
    if zero.min(initial=0) < 0 or zero.max(initial=0) > _MAX_FACTOR:
        return None
    found = _in_multiples(scales[:, firsts])
    if found is None or (found[1] * np.maximum(zero, _MAX_FACTOR - zero) > _MAX_INT8).any():
        return None
    return found[0], found[1] | zero.astype(np.uint8) << np.uint8(4)


def _in_multiples(scales: F32) -> tuple[F32, U8] | None:
    """Return f32[N, G] and u8[N, G, n] from 1 to 15 whose products are scales [N, G, n]; None where there are none.

    The multiples have no common divisor, so that a scale which was quantised with factors is found again.
    """
    own = scales.reshape(-1, scales.shape[2])
    largest = np.take_along_axis(own, np.abs(own).argmax(axis=1)[:, None], axis=1)
    common, multiples = np.empty((len(own), 1), np.float32), np.empty(own.shape, np.uint8)
    left = np.arange(len(own))
    for divisor in (1, *range(_MAX_FACTOR, 1, -1)):
        found = largest[left] / np.float32(divisor)
        with np.errstate(divide="ignore", invalid="ignore"):
            counts = np.where(found == 0, 1, np.rint(own[left] / found))
        fits = ((counts * found.astype(np.float64) == own[left]) & (counts >= 1)).all(axis=1)
        counts = counts[fits].astype(np.uint8)
        divisors = np.gcd.reduce(counts, axis=1, keepdims=True)
        common[left[fits]], multiples[left[fits]] = found[fits] * divisors, counts // divisors
        left = left[~fits]
        if not len(left):
            return common.reshape(scales.shape[:2]), multiples.reshape(scales.shape)
    return None
