"""Meaning of all_reduce and all_gather, given what every rank has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.types import F32


def all_reduce(
    ranks: Sequence[F32], out_dtype: npt.DTypeLike, bias: F32 | None = None, shared: Array | None = None
) -> Array:
    """Add f32[T, H] of 1, 2 or 4 ranks as a binary tree in float32, then bias and shared; round to out_dtype."""
    sums = list(ranks)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    y = sums[0]
    if bias is not None:
        y = y + bias
    if shared is not None:
        y = y + widen(shared)
    return narrow(y, out_dtype)


def all_gather(ranks: Sequence[Array]) -> Array:
    """Put the ranks' columns side by side."""
    return np.concatenate(ranks, axis=1)
