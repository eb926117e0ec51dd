"""RMS normalisation with a float32 residual stream."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.ops.norm import concat_rms_norm, rms_norm


class RmsNorm:
    """h = x (+ residual); returns (h normalised and scaled, in x's dtype; h as float32)."""

    def __init__(self, weight: Weights, eps: float) -> None:
        self._weight, self._eps = constant(weight), eps

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self._weight, self._eps, residual)


class ConcatRmsNorm:
    """Two matrices [T, H], each normalised and scaled with weights of its own, side by side: [T, 2 * H]."""

    def __init__(self, first_weight: Weights, second_weight: Weights, eps: float) -> None:
        self._first, self._second = constant(first_weight), constant(second_weight)
        self._eps = eps

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        return concat_rms_norm(first, second, self._first, self._second, self._eps)
