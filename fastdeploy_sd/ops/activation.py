"""swiglu: the gate of a feed-forward network."""

from __future__ import annotations

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, DTypeOf, In, Out
from fastdeploy_sd.device.program.op import A, Op

SWIGLU = Op(
    "swiglu",
    "num_rows",
    gate_up=In(ACTIVATIONS, "num_rows, 2*intermediate_size"),
    dtype=DTypeOf("gate_up"),
    y=Out("gate_up", "num_rows, intermediate_size"),
)


def swiglu(gate_up: A) -> A:
    """Gate a feed-forward network: y = silu(gate) * up, where a row is [gate | up]. Computed in float32.

    gate_up is f32, bf16 or f16 [T, 2 * I]; y has the same dtype, [T, I].
    """
    y: A = SWIGLU(gate_up=gate_up)
    return y
