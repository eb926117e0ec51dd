"""Meaning of cast."""

from __future__ import annotations

import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen


def cast(x: Array, dtype: npt.DTypeLike) -> Array:
    """Return x [T, N] in float32, bfloat16 or float16; the last two are rounded to nearest, ties to even."""
    return narrow(widen(x), dtype)
