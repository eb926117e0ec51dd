"""gated_delta_net_: a layer with a state of fixed size per request, from its input to its output projection."""

from __future__ import annotations

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, Attr, DTypeOf, In, InOut, Out, each
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.delta_memory import DeltaMemory, DeltaStates, DeltaWeights

_QKV = "2*num_key_heads*key_dim + num_value_heads*value_dim"

GATED_DELTA_NET = Op(
    "gated_delta_net",
    "num_requests",
    state=InOut(F32, "num_slots, num_value_heads, key_dim, value_dim"),
    conv_weight=In(F32, f"conv_width, {_QKV}"),
    **each(In(F32, "num_value_heads"), "a_log", "dt_bias"),
    norm_weight=In(F32, "value_dim"),
    qkvz=In(ACTIVATIONS, f"num_tokens, {_QKV} + num_value_heads*value_dim"),
    ba=In("qkvz", "num_tokens, 2*num_value_heads"),
    dtype=DTypeOf("qkvz"),
    conv_rows=InOut("qkvz", f"num_slots, conv_width - 1, {_QKV}"),
    draft_rows=InOut("qkvz", f"num_table_rows, max_drafts, {_QKV} + 2*num_value_heads"),
    **each(In(I32, "num_requests"), "table_rows", "source", "num_replayed", "num_certain"),
    **each(In(I32, "num_requests + 1"), "query_start_loc", "cu_snapshots"),
    **each(In(I32, "num_snapshots"), "snapshot_ends", "snapshot_slots"),
    eps=Attr(float),
    y=Out("qkvz", "num_tokens, num_value_heads*value_dim"),
)


def gated_delta_net_(
    qkvz: A, ba: A, weights: DeltaWeights[A], memory: DeltaMemory[A], states: DeltaStates[A], query_start_loc: A
) -> A:
    """Run a gated delta net over every request's rows; `memory` is changed in place.

    Meaning: `reference.gated_delta`. All sums are in float32 and in one order, so a row's bits depend on the rows of
    its text alone: not on how steps cut it, nor on what else is in the call. Nothing is read or written of a request
    without rows. No slot may be written twice, nor read by another request than the one that writes it.

    Source: arXiv:2412.06464.

    Args:
        qkvz: f32, bf16 or f16 [T, C + Hv * dv], columns q | k | v | z, each head by head.
        ba: the same dtype [T, 2 * Hv], columns b | a.
        query_start_loc: i32[R + 1], request r owns rows [q[r], q[r + 1]). Rows after the last become zeros.

    Returns:
        The same dtype [T, Hv * dv].

    Raises ValueError: an argument contradicts the others; then nothing is written. On a GPU values are not checked.
    """
    y: A = GATED_DELTA_NET(
        qkvz=qkvz,
        ba=ba,
        conv_weight=weights.conv,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        norm_weight=weights.norm,
        eps=weights.eps,
        state=memory.state,
        conv_rows=memory.conv,
        draft_rows=memory.drafts,
        **states._asdict(),
        query_start_loc=query_start_loc,
    )
    return y
