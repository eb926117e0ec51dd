"""Meaning of rms_norm."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.native.arrays import Array
from fastdeploy_sd.types import F32


def rms_norm(x: Array, weight: F32, eps: float, residual: F32 | None = None) -> tuple[Array, F32]:
    """Normalise each row of h = x (+ residual) by its root mean square and scale it.

    Args:
        x: f32 or bf16 [T, H].
        weight: f32[H].
        residual: f32[T, H].

    Returns:
        y in x's dtype [T, H] and h, f32[T, H].

    Source: arXiv:1910.07467.
    """
    h = widen(x) if residual is None else widen(x) + residual
    scale = 1.0 / np.sqrt(np.mean(np.square(h, dtype=np.float64), axis=-1, keepdims=True) + eps)
    return narrow((h * scale * weight).astype(np.float32), x.dtype), h
