"""Meaning of moe_ffn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.reference.linear import linear
from fastdeploy_sd.ops.reference.rowwise import swiglu
from fastdeploy_sd.types import F32, I32


def route(  # noqa: PLR0913
    x: Array,
    router_weight: F32,
    top_k: int,
    normalize: bool,
    norm_min: float,
    *,
    scale: float = 1.0,
    sigmoid: bool = False,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    router_bias: F32 | None = None,
    selection_bias: F32 | None = None,
) -> tuple[I32, F32]:
    """Choose each token's experts and their weights.

    Experts rank by probability plus selection_bias, the lowest id first among equals; the weight of a chosen one is its
    probability without the bias. The groups of experts that are chosen from have the highest sums of two scores.

    Returns:
        expert ids i32[T, top_k] and weights f32[T, top_k], divided by max(their sum, norm_min) when `normalize`.
    """
    logits = widen(x).astype(np.float64) @ router_weight.astype(np.float64).T
    logits = logits if router_bias is None else logits + router_bias
    if sigmoid:
        probs = 1 / (1 + np.exp(-logits))
    else:
        probs = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        probs /= probs.sum(axis=1, keepdims=True)
    scores = probs if selection_bias is None else probs + selection_bias
    if num_chosen_groups < num_groups:
        groups = scores.reshape(len(scores), num_groups, -1)
        order = np.argsort(-np.sort(groups, axis=2)[:, :, -2:].sum(axis=2), axis=1, kind="stable")
        np.put_along_axis(groups, order[:, num_chosen_groups:, None], -np.inf, axis=1)
        scores = groups.reshape(scores.shape)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probs, chosen, axis=1)
    if normalize:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), norm_min)
    return chosen.astype(np.int32), (weights * scale).astype(np.float32)


def clamped_swiglu(gate_up: Array, limit: float) -> Array:
    """Return g * sigmoid(1.702 g) * (u + 1) of rows [gate | up], with g = min(gate, limit) and u = up in +-limit.

    Source: openai/gpt-oss, gpt_oss/torch/model.py.
    """
    gate, up = np.split(widen(gate_up).astype(np.float64), 2, axis=1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return narrow((gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(np.float32), gate_up.dtype)


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
    gate_up_bias: F32 | None = None,
    down_bias: F32 | None = None,
    gate_limit: float | None = None,
    shared: Array | None = None,
    first_expert: int = 0,
    out_dtype: npt.DTypeLike | None = None,
    **routing: Any,
) -> Array:
    """y = sum over the chosen experts that are here of weight * down(swiglu(gate_up(x))); arguments as ops.moe.moe_ffn.

    Args:
        gate_up: f32, bf16 or f16 [L, 2 * I, H], not yet in the format.
        down: f32, bf16 or f16 [L, H, I], likewise.
        out_dtype: float32, float16 or uint16 (bf16 bits); None is x's dtype.
        routing: as `route` has it.

    Source: arXiv:1701.06538 (top-k gating); arXiv:2408.15664 (selection bias without an auxiliary loss);
    arXiv:2412.19437, section 2.1.2 (sigmoid, groups).
    """
    chosen, weights = route(x, router_weight, top_k, normalize, norm_min, **routing)
    y = np.zeros(x.shape, np.float64)
    for e in range(len(down)):
        tokens, places = np.nonzero(chosen == first_expert + e)
        gated = linear(x[tokens], gate_up[e], fmt, None if gate_up_bias is None else gate_up_bias[e])
        hidden = swiglu(gated) if gate_limit is None else clamped_swiglu(gated, gate_limit)
        out = linear(hidden, down[e], fmt, None if down_bias is None else down_bias[e], out_dtype=np.float32)
        y[tokens] += weights[tokens, places][:, None] * widen(out)
    if shared is not None:
        y += widen(shared)
    return narrow(y.astype(np.float32), x.dtype if out_dtype is None else out_dtype)
