"""cast on Paddle tensors."""

from __future__ import annotations

import paddle
from paddle import Tensor

from fastdeploy_sd.ops import shim


def cast(x: Tensor, dtype: paddle.dtype) -> Tensor:
    """Return x in another dtype; bfloat16 is rounded to nearest, ties to even.

    Args:
        x: f32 or bf16 [T, N].
        dtype: float32 or bfloat16.

    Returns:
        [T, N]; x itself when it has the dtype already.

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    if dtype not in (paddle.float32, paddle.bfloat16):
        raise ValueError(f"dtype: expected float32 or bfloat16, got {dtype}")
    return x if x.dtype == dtype else shim.run("cast", x, dtype == paddle.float32)[0]
