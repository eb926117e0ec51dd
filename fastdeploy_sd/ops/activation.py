"""swiglu on Paddle tensors."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.ops import shim


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate a feed-forward network: y = silu(gate) * up, where a row is [gate | up]. Computed in float32.

    Args:
        gate_up: f32 or bf16 [T, 2 * I].

    Returns:
        The same dtype, [T, I].

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    return shim.run("swiglu", gate_up)[0]
