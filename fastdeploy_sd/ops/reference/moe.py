"""Meaning of moe_ffn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.reference.linear import linear
from fastdeploy_sd.ops.reference.rowwise import swiglu
from fastdeploy_sd.types import F32, I32


def route(
    x: Array, router_weight: F32, top_k: int, normalize: bool, norm_min: float, selection_bias: F32 | None = None
) -> tuple[I32, F32]:
    """Choose each token's experts and their weights.

    Experts rank by probability (softmax over all) plus selection_bias, the lowest id first among equals; the weight of
    a chosen one is its probability without the bias.

    Returns:
        expert ids i32[T, top_k] and weights f32[T, top_k], divided by max(their sum, norm_min) when `normalize`.
    """
    logits = widen(x).astype(np.float64) @ router_weight.astype(np.float64).T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    probs /= probs.sum(axis=1, keepdims=True)
    scores = probs if selection_bias is None else probs + selection_bias
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probs, chosen, axis=1)
    if normalize:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), norm_min)
    return chosen.astype(np.int32), weights.astype(np.float32)


def moe_ffn(  # noqa: PLR0913
    x: Array,
    router_weight: F32,
    gate_up: Array,
    down: Array,
    fmt: LinearFormat,
    *,
    top_k: int,
    normalize: bool,
    norm_min: float,
    selection_bias: F32 | None = None,
    shared: Array | None = None,
    first_expert: int = 0,
    out_dtype: npt.DTypeLike | None = None,
) -> Array:
    """y = sum over the chosen experts that are here of weight * down(swiglu(gate_up(x))); arguments as ops.moe.moe_ffn.

    Args:
        gate_up: f32, bf16 or f16 [L, 2 * I, H], not yet in the format.
        down: f32, bf16 or f16 [L, H, I], likewise.
        out_dtype: float32, float16 or uint16 (bf16 bits); None is x's dtype.

    Source: arXiv:1701.06538 (top-k gating); arXiv:2408.15664 (selection bias without an auxiliary loss).
    """
    chosen, weights = route(x, router_weight, top_k, normalize, norm_min, selection_bias)
    y = np.zeros(x.shape, np.float64)
    for e in range(len(down)):
        tokens, places = np.nonzero(chosen == first_expert + e)
        hidden = swiglu(linear(x[tokens], gate_up[e], fmt))
        out = linear(hidden, down[e], fmt, out_dtype=np.float32)
        y[tokens] += weights[tokens, places][:, None] * widen(out)
    if shared is not None:
        y += widen(shared)
    return narrow(y.astype(np.float32), x.dtype if out_dtype is None else out_dtype)
