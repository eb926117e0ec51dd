"""pack_experts and moe_ffn on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, dtype_code, pointer
from fastdeploy_sd.ops.native.linear import as_matrix, format_code, pack_into, packed_bytes
from fastdeploy_sd.ops.native.memory import WeightMemory
from fastdeploy_sd.ops.reference.linear import LinearFormat
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import F32


class MoeFfnParams(CParams):
    """Twin of fdsd::MoeFfnParams."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("normalize", ctypes.c_int32),
        ("norm_min", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("router_weight", ctypes.c_void_p),
        ("selection_bias", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class PackedExperts:
    """One weight matrix of every expert, packed one after another.

    Attributes:
        data: u8[num_experts * packed_bytes(...)], 64-byte aligned.
    """

    data: npt.NDArray[np.uint8]
    num_experts: int
    in_features: int
    out_features: int
    format: LinearFormat


Experts = Sequence[Array | WeightMatrix] | Array


def experts_shape(weights: Experts) -> tuple[int, int]:
    """Return the (out_features, in_features) that all experts share.

    Raises:
        ValueError: no expert, or shapes that differ.
    """
    shapes = {as_matrix(weight).shape for weight in weights}
    if len(shapes) != 1:
        raise ValueError(f"weights: expected experts of one shape [N, K], got shapes {sorted(shapes)}")
    return shapes.pop()


def pack_experts_into(address: int, weights: Experts, fmt: LinearFormat) -> None:
    """Pack matrices one after another into memory at a 64-byte aligned address.

    Raises:
        ValueError: a shape, dtype or the alignment disagrees.
    """
    out_features, in_features = experts_shape(weights)
    size = packed_bytes(in_features, out_features, fmt)
    for i, weight in enumerate(weights):
        pack_into(address + i * size, weight, fmt)


def pack_experts(weights: Experts, fmt: LinearFormat) -> PackedExperts:
    """Pack one matrix per expert, all of one shape.

    Args:
        weights: as for `pack_linear`, each; an array [E, N, K] will do.

    Raises:
        ValueError: unknown format, no expert, or a shape or dtype disagrees.
    """
    out_features, in_features = experts_shape(weights)
    data = WeightMemory().take(len(weights) * packed_bytes(in_features, out_features, fmt))
    pack_experts_into(data.ctypes.data, weights, fmt)
    return PackedExperts(data, len(weights), in_features, out_features, fmt)


def moe_ffn(  # noqa: PLR0913
    x: Array,
    router_weight: F32,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    top_k: int,
    normalize: bool,
    norm_min: float,
    selection_bias: F32 | None = None,
    shared: Array | None = None,
) -> Array:
    """See `reference.moe.moe_ffn`.

    Raises:
        ValueError: a shape or dtype disagrees, or top_k is not in 1..E.
    """
    tokens, hidden = x.shape
    experts, inner = gate_up.num_experts, down.in_features
    if (gate_up.in_features, gate_up.out_features) != (hidden, 2 * inner):
        got = [gate_up.out_features, gate_up.in_features]
        raise ValueError(f"gate_up: expected matrices [{2 * inner}, {hidden}], got {got}")
    if (down.out_features, down.num_experts, down.format) != (hidden, experts, gate_up.format):
        raise ValueError(f"down: expected {experts} matrices of {hidden} rows like gate_up, got {down.num_experts}")
    y = np.empty_like(x)
    params = MoeFfnParams(
        tokens,
        hidden,
        inner,
        experts,
        top_k,
        normalize,
        norm_min,
        dtype_code("x", x),
        format_code(gate_up.format),
        pointer("x", x, x.shape, x.dtype),
        pointer("router_weight", router_weight, (experts, hidden), np.float32),
        pointer("selection_bias", selection_bias, (experts,), np.float32),
        pointer("gate_up", gate_up.data, gate_up.data.shape, np.uint8),
        pointer("down", down.data, down.data.shape, np.uint8),
        pointer("shared", shared, x.shape, x.dtype),
        pointer("y", y, x.shape, x.dtype),
    )
    call("moe_ffn", params)
    return y
