"""A linear layer over packed weights."""

from __future__ import annotations

import paddle
from paddle import Tensor

from fastdeploy_sd.checkpoint import Weights
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.packing import PackedLinear


class Linear:
    """y = x . weight^T (+ bias)."""

    def __init__(self, packed: PackedLinear[Tensor], bias: Weights | None) -> None:
        self._packed = packed
        self._bias = None if bias is None else paddle.to_tensor(bias)

    def __call__(self, x: Tensor, out_dtype: paddle.dtype | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype, or in out_dtype."""
        return linear(x, self._packed, self._bias, out_dtype)
