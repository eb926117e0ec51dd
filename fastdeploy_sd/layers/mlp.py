"""Feed-forward networks: dense SwiGLU, and mixture of experts with optional shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paddle import Tensor

from fastdeploy_sd.layers.linear import Linear
from fastdeploy_sd.ops.activation import swiglu
from fastdeploy_sd.ops.moe import moe_ffn
from fastdeploy_sd.ops.packing import PackedExperts


class FeedForward(Protocol):
    """Maps [T, H] to [T, H]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class SwigluMlp:
    """down(silu(gate(x)) * up(x)), gate and up in one multiplication."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(swiglu(self._gate_up(x)))


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """How a token chooses its experts.

    Attributes:
        weight: f32[E, H]; probabilities are the softmax of its products.
        selection_bias: f32[E] added to the probabilities for choosing only, or None.
        normalize, norm_min: divide the chosen probabilities by max(their sum, norm_min).
    """

    weight: Tensor
    selection_bias: Tensor | None
    top_k: int
    normalize: bool
    norm_min: float


class MoeMlp:
    """The chosen experts' weighted sum, plus the shared experts' output."""

    def __init__(
        self, router: Router, gate_up: PackedExperts[Tensor], down: PackedExperts[Tensor], shared: SwigluMlp | None
    ) -> None:
        self._router, self._gate_up, self._down, self._shared = router, gate_up, down, shared

    def __call__(self, x: Tensor) -> Tensor:
        r = self._router
        shared = None if self._shared is None else self._shared(x)
        return moe_ffn(
            x, r.weight, self._gate_up, self._down, top_k=r.top_k, normalize=r.normalize, norm_min=r.norm_min,
            selection_bias=r.selection_bias, shared=shared,
        )  # fmt: skip
