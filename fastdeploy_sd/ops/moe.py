"""pack_experts and moe_ffn on Paddle tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.native import moe as native
from fastdeploy_sd.ops.native.linear import format_code
from fastdeploy_sd.ops.reference.linear import LinearFormat
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.ops.weight_matrix import WeightMatrix


@dataclass(frozen=True)
class PackedExperts:
    """One weight matrix of every expert, packed one after another.

    Attributes:
        data: u8[bytes]; the same on every instruction-set level.
    """

    data: Tensor
    num_experts: int
    in_features: int
    out_features: int
    format: LinearFormat


def pack_experts(weights: Sequence[npt.NDArray[np.generic] | WeightMatrix], fmt: LinearFormat) -> PackedExperts:
    """Quantise and reorder one matrix per expert; see `ops.linear.pack_linear`.

    Args:
        weights: as for `pack_linear`, each, all of one shape.

    Raises:
        ValueError: unknown format, no expert, or a shape or dtype disagrees.
    """
    packed = native.pack_experts(weights, fmt)
    shape = (packed.num_experts, packed.in_features, packed.out_features)
    return PackedExperts(from_numpy(packed.data), *shape, fmt)


def moe_ffn(  # noqa: PLR0913
    x: Tensor,
    router_weight: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    top_k: int,
    normalize: bool,
    norm_min: float,
    selection_bias: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """Mixture of experts: the weighted sum of the top_k experts' SwiGLU networks. A row depends on its own x alone.

    Experts rank by router probability (float32 softmax over all of them) plus selection_bias, the lowest id first among
    equals; a chosen one weighs its probability, divided by max(sum of the chosen, norm_min) when `normalize`. Within
    an expert gate_up's and swiglu's results are rounded to x's dtype; the sum is float32, in the order of expert ids.

    Args:
        x: f32 or bf16 [T, H].
        router_weight: f32[E, H].
        gate_up: E matrices [2 * I, H].
        down: E matrices [H, I], in the same format.
        selection_bias: f32[E].
        shared: [T, H] in x's dtype, the output of shared experts; added to the float32 sum.

    Returns:
        y in x's dtype, [T, H].

    Raises:
        ValueError: a shape or dtype disagrees, or top_k is not in 1..E.
    """
    if down.format != gate_up.format:
        raise ValueError(f"down: expected format {gate_up.format} like gate_up, got {down.format}")
    attributes = (down.in_features, format_code(gate_up.format), top_k, normalize, norm_min)
    tensors = (gate_up.data, down.data, selection_bias, shared)
    (y,) = shim.run("moe_ffn", x, router_weight, *tensors, *attributes)
    return y
