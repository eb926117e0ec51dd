"""Feed-forward networks: dense SwiGLU, and mixture of experts with optional shared experts."""

from __future__ import annotations

from typing import Protocol

import paddle
from paddle import Tensor

from fastdeploy_sd.layers.linear import Linear
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import MoeConfig
from fastdeploy_sd.ops.activation import swiglu
from fastdeploy_sd.ops.moe import PackedExperts, moe_ffn


class FeedForward(Protocol):
    """Maps [T, H] to [T, H]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class SwigluMlp:
    """down(silu(gate(x)) * up(x)), gate and up in one multiplication."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(swiglu(self._gate_up(x)))


class MoeMlp:
    """The chosen experts' weighted sum, plus the shared experts' output."""

    def __init__(
        self,
        config: MoeConfig,
        router: tuple[Weights, Weights | None],
        experts: tuple[PackedExperts, PackedExperts],
        shared: SwigluMlp | None,
    ) -> None:
        self._config, self._shared = config, shared
        weight, bias = router
        self._router, self._selection_bias = paddle.to_tensor(weight), None if bias is None else paddle.to_tensor(bias)
        self._gate_up, self._down = experts

    def __call__(self, x: Tensor) -> Tensor:
        c = self._config
        y = moe_ffn(
            x, self._router, self._gate_up, self._down,
            top_k=c.top_k, normalize=c.normalize, norm_min=c.norm_min, selection_bias=self._selection_bias,
        )  # fmt: skip
        return y if self._shared is None else y + self._shared(x)
