"""lora_shrink and lora_expand_: what low-rank adapters add to a linear layer, each row the adapter in its slot.

The meaning of each op is the function of its name in `reference.lora`. Source: arXiv:2106.09685.
"""

from __future__ import annotations

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, Attr, DTypeOf, In, InOut, Out
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.adapter_slots import AdapterSlots
from fastdeploy_sd.types.ranges import SliceRule

LORA_SHRINK = Op(
    "lora_shrink",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, in_features"),
    slots=In(I32, "num_rows"),
    ranks=In(I32, "num_slots, num_parts"),
    a=In("x", "num_slots, num_parts*max_rank, in_features"),
    num_slices=Attr(int),
    slice_unit=Attr(int),
    dtype=DTypeOf("x"),
    u=Out(F32, "num_rows, num_parts*max_rank"),
)
LORA_EXPAND = Op(
    "lora_expand",
    "num_rows",
    y=InOut(ACTIVATIONS, "num_rows, out_features"),
    slots=In(I32, "num_rows"),
    ranks=In(I32, "num_slots, num_parts"),
    scales=In(F32, "num_slots, num_parts"),
    part_ends=In(I32, "num_parts"),
    b=In("y", "num_slots, max_rank, out_features"),
    u=In(F32, "num_rows, num_parts*max_rank"),
    dtype=DTypeOf("y"),
)


def lora_shrink(x: A, slots: A, adapters: AdapterSlots[A], slices: SliceRule) -> A:
    """u f32[T, P * R] = x [T, K] . a[slot]^T; zeros of rows in slot -1 and beyond a rank.

    A row depends on its row of x and its slot alone. Sums are float32; those of `slices` are added in a tree.
    `slots`: i32[T] in -1..S-1.
    """
    u: A = LORA_SHRINK(
        x=x, slots=slots, ranks=adapters.ranks, a=adapters.a, num_slices=slices.count, slice_unit=slices.unit
    )
    return u


def lora_expand_(y: A, u: A, slots: A, adapters: AdapterSlots[A]) -> None:
    """y [T, N] += scale * u . b[slot], in place and rounded once. Rows in slot -1 are not touched."""
    LORA_EXPAND(
        y=y,
        slots=slots,
        ranks=adapters.ranks,
        scales=adapters.scales,
        part_ends=adapters.part_ends,
        b=adapters.b,
        u=u,
    )
