"""dispatch_experts and combine_experts: a mixture of experts whose experts are spread over ranks."""

from __future__ import annotations

from typing import Any, Unpack

from fastdeploy_sd.device.device_tensor import dtype_name
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, Attr, DTypeOf, In, Out
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.moe import ROUTER, RouterOptions, router_arguments

DISPATCH_EXPERTS = Op(
    "dispatch_experts",
    "num_tokens",
    service=Attr(int),
    layer=Attr(int),
    part=Attr(int),
    num_parts=Attr(int),
    is_first=Attr(bool),
    x=In(ACTIVATIONS, "num_tokens, hidden_size"),
    **ROUTER,
    dtype=DTypeOf("x"),
    expert_ids=Out(I32, "num_tokens, top_k"),
    weights=Out(F32, "num_tokens, top_k"),
)
COMBINE_EXPERTS = Op(
    "combine_experts",
    "num_tokens",
    service=Attr(int),
    layer=Attr(int),
    part=Attr(int),
    num_parts=Attr(int),
    is_last=Attr(bool),
    num_slices=Attr(int),
    x=In(ACTIVATIONS, "num_tokens, hidden_size"),
    expert_ids=In(I32, "num_tokens, top_k"),
    weights=In(F32, "num_tokens, top_k"),
    shared=In("x", "num_tokens, hidden_size", optional=True),
    dtype=DTypeOf("x"),
    y_dtype=Attr(ACTIVATIONS),
    y=Out("y_dtype", "num_tokens, hidden_size"),
)


def dispatch_experts(  # noqa: PLR0913
    x: A,
    router_weight: A,
    service: ExpertService | None,
    layer: int,
    *,
    part: int = 0,
    num_parts: int = 1,
    is_first: bool = False,
    **router: Unpack[RouterOptions],
) -> tuple[A, A]:
    """Choose each token's experts, as `moe_ffn` does, and give the tokens to the ranks that have these.

    Ranks that have the same tokens share them: each gives a part of theirs. Tokens of other parts have expert ids -1
    and weights 0. `combine_experts` must follow before the next call.

    Args:
        x, router_weight, router: as `moe_ffn`'s.
        service: this rank's; None = the tokens are given to no rank.
        layer: its number in the service.
        part, num_parts: tokens T * part // num_parts to T * (part + 1) // num_parts - 1 are this rank's.
        is_first: of a pass. It may wait a little, so that ranks begin their passes together.

    Returns:
        expert ids i32[T, top_k], ascending, and their weights f32[T, top_k].

    Raises ValueError: a rank still has rows of a call that failed, and does not come; the text names the rank.
    """
    expert_ids, weights = DISPATCH_EXPERTS(
        x=x,
        router_weight=router_weight,
        service=0 if service is None else service.handle,
        layer=layer,
        part=part,
        num_parts=num_parts,
        is_first=is_first,
        **router_arguments(router),
    )
    return expert_ids, weights


def combine_experts(  # noqa: PLR0913
    x: A,
    expert_ids: A,
    weights: A,
    service: ExpertService,
    layer: int,
    *,
    num_slices: int = 1,
    part: int = 0,
    num_parts: int = 1,
    is_last: bool = False,
    shared: A | None = None,
    out_dtype: Any = None,
) -> A:
    """Wait for the experts that `dispatch_experts` chose, and add them up: `moe_ffn` of all experts, bit for bit.

    Tokens of other parts are -0, which leaves every number as it is in an `all_reduce` of the parts.

    Args:
        x, expert_ids, weights: as dispatched, and as it returned them.
        num_slices, shared, out_dtype: as `moe_ffn`'s, of all experts.
        is_last: of a pass.

    Raises ValueError: a rank does not run its experts in time or has ended for good; the text names the rank.
    """
    y: A = COMBINE_EXPERTS(
        x=x,
        expert_ids=expert_ids,
        weights=weights,
        shared=shared,
        service=service.handle,
        layer=layer,
        part=part,
        num_parts=num_parts,
        is_last=is_last,
        num_slices=num_slices,
        y_dtype=dtype_name(x.dtype if out_dtype is None else out_dtype),
    )
    return y
