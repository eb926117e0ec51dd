"""moe_ffn: a mixture of experts over packed weight matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Required, TypedDict, Unpack

from fastdeploy_sd.device.device_tensor import dtype_name
from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, U8, Attr, DTypeOf, In, Out
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.linear_format import format_code
from fastdeploy_sd.ops.packing import PackedExperts

# What ops that route declare of the router.
ROUTER: Mapping[str, In | Attr] = {
    "router_weight": In(F32, "num_experts, hidden_size"),
    "router_bias": In(F32, "num_experts", optional=True),
    "selection_bias": In(F32, "num_experts", optional=True),
    "sigmoid": Attr(bool),
    "num_groups": Attr(int),
    "num_chosen_groups": Attr(int),
    "top_k": Attr(int),
    "normalize": Attr(bool),
    "norm_min": Attr(float),
    "scale": Attr(float),
}


class RouterOptions(TypedDict, total=False):
    """What functions of ops that route take besides the router's weight; see `moe_ffn`."""

    top_k: Required[int]
    normalize: Required[bool]
    norm_min: Required[float]
    scale: float
    sigmoid: bool
    num_groups: int
    num_chosen_groups: int
    router_bias: Any
    selection_bias: Any


def router_arguments(options: RouterOptions) -> dict[str, Any]:
    """Return what an op takes of the router, by the names of its declaration."""
    plain = {"scale": 1.0, "sigmoid": False, "num_groups": 1, "num_chosen_groups": 1}
    return {**plain, "router_bias": None, "selection_bias": None, **options}


MOE_FFN = Op(
    "moe_ffn",
    "num_tokens",
    hidden_size=Attr(int),
    intermediate_size=Attr(int),
    first_expert=Attr(int),
    num_local_experts=Attr(int),
    num_slices=Attr(int),
    gate_up_format=Attr(int),
    down_format=Attr(int),
    x=In(ACTIVATIONS, "num_tokens, hidden_size"),
    **ROUTER,
    gate_up=In(U8, "num_local_experts*packed_linear_bytes(hidden_size, 2*intermediate_size, gate_up_format, 1, 1)"),
    down=In(U8, "num_local_experts*packed_linear_bytes(intermediate_size, hidden_size, down_format, 1, 1)"),
    gate_up_bias=In(F32, "num_local_experts, 2*intermediate_size", optional=True),
    down_bias=In(F32, "num_local_experts, hidden_size", optional=True),
    gate_limit=Attr(float),
    shared=In("x", "num_tokens, hidden_size", optional=True),
    dtype=DTypeOf("x"),
    y_dtype=Attr(ACTIVATIONS),
    y=Out("y_dtype", "num_tokens, hidden_size"),
)


def moe_ffn(  # noqa: PLR0913
    x: A,
    router_weight: A,
    gate_up: PackedExperts[A],
    down: PackedExperts[A],
    *,
    gate_up_bias: A | None = None,
    down_bias: A | None = None,
    gate_limit: float | None = None,
    shared: A | None = None,
    first_expert: int = 0,
    num_slices: int = 1,
    out_dtype: Any = None,
    **router: Unpack[RouterOptions],
) -> A:
    """Mixture of experts: the weighted sum of the top_k experts' SwiGLU networks. A row depends on its own x alone.

    Experts rank by router probability (float32 softmax over all of them, or each logit's sigmoid) plus selection_bias,
    the lowest id first among equals; a chosen one weighs its probability, divided by max(sum of the chosen, norm_min)
    when `normalize`, times `scale`. Of num_groups ranges of experts those num_chosen_groups are chosen from whose two
    best have the highest sums. Within an expert gate_up's and swiglu's results are rounded to x's dtype; the sum is
    float32, in the order of expert ids.

    A rank may have L of the E experts and returns their part of the sum. The sum is cut into slices of the L experts,
    which are added as `linear` adds slices: where the rank has a whole half of E, with half as many slices, the ranks'
    parts in float32 make what one rank computes, bit for bit.

    Args:
        x, router_weight: f32, bf16 or f16 [T, H]; f32[E, H].
        router_bias, selection_bias: f32[E], of the logits; f32[E].
        gate_up, down: L matrices [2 * I, H] and [H, I].
        gate_up_bias, down_bias: f32[L, 2 * I], f32[L, H].
        gate_limit: c > 0: with g = min(gate, c) and u = up in -c..c, swiglu becomes g * sigmoid(1.702 g) * (u + 1).
        shared: [T, H] in x's dtype, the output of shared experts; added to the float32 sum.
        first_expert: the id of the first of the L experts.
        num_slices: 1, 2 or 4.
    """
    shape = (down.num_experts, 2 * down.in_features, down.out_features)
    got = (gate_up.num_experts, gate_up.out_features, gate_up.in_features)
    if got != shape:
        expected = "{} matrices [{}, {}]".format
        raise ValueError(f"moe_ffn: gate_up: expected {expected(*shape)} to fit down, got {expected(*got)}")
    y: A = MOE_FFN(
        x=x,
        router_weight=router_weight,
        gate_up=gate_up.data,
        down=down.data,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        gate_limit=gate_limit or 0.0,
        shared=shared,
        hidden_size=down.out_features,
        intermediate_size=down.in_features,
        first_expert=first_expert,
        num_local_experts=down.num_experts,
        num_slices=num_slices,
        gate_up_format=format_code(gate_up.format),
        down_format=format_code(down.format),
        y_dtype=dtype_name(x.dtype if out_dtype is None else out_dtype),
        **router_arguments(router),
    )
    return y
