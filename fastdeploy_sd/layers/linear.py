"""A linear layer over packed weights."""

from __future__ import annotations

import paddle
from paddle import Tensor

from fastdeploy_sd.checkpoint import Weights
from fastdeploy_sd.ops.linear import linear, pack_linear
from fastdeploy_sd.ops.reference.linear import LinearFormat


class Linear:
    """y = x . weight^T (+ bias), the weight packed for the kernel in the given format."""

    def __init__(self, weight: Weights, bias: Weights | None, weight_format: LinearFormat) -> None:
        self._packed = pack_linear(weight, weight_format)
        self._bias = None if bias is None else paddle.to_tensor(bias)

    def __call__(self, x: Tensor, out_dtype: paddle.dtype | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype, or in out_dtype."""
        return linear(x, self._packed, self._bias, out_dtype)
