"""Meaning of dispatch_experts; that of combine_experts is moe_ffn."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.reference.moe import route
from fastdeploy_sd.types import F32, I32


def dispatch_experts(
    x: Array, router_weight: F32, *, part: int = 0, num_parts: int = 1, **routing: Any
) -> tuple[I32, F32]:
    """The expert ids i32[T, top_k] of the part's tokens, ascending, and their weights; -1 and 0 of others."""
    chosen, weights = route(x, router_weight, **routing)
    order = np.argsort(chosen, axis=1)
    chosen, weights = np.take_along_axis(chosen, order, axis=1), np.take_along_axis(weights, order, axis=1)
    is_other = np.ones(len(x), np.bool_)
    is_other[len(x) * part // num_parts : len(x) * (part + 1) // num_parts] = False
    chosen[is_other], weights[is_other] = -1, 0
    return chosen, weights
