"""pack_linear and linear on Paddle tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.native import linear as native
from fastdeploy_sd.ops.native.linear import format_code
from fastdeploy_sd.ops.reference.linear import LinearFormat
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.ops.weight_matrix import WeightMatrix


@dataclass(frozen=True)
class PackedLinear:
    """A weight matrix in the layout the kernel streams.

    Attributes:
        data: u8[bytes] as pack_linear made it; the same on every instruction-set level.
    """

    data: Tensor
    in_features: int
    out_features: int
    format: LinearFormat


def pack_linear(weight: npt.NDArray[np.generic] | WeightMatrix, fmt: LinearFormat) -> PackedLinear:
    """Quantise and reorder a weight matrix for `linear`.

    wint8 and wint4 keep one float32 scale per output and group of 128 inputs; see `reference.linear.stored_weight`.

    Args:
        weight: f32, f16 or bf16 (u16 bits) [N, K], or parts of it; read in place.

    Raises:
        ValueError: unknown format, or not a matrix of such a type.
    """
    packed = native.pack_linear(weight, fmt)
    return PackedLinear(from_numpy(packed.data), packed.in_features, packed.out_features, fmt)


def linear(
    x: Tensor, packed: PackedLinear, bias: Tensor | None = None, out_dtype: paddle.dtype | None = None
) -> Tensor:
    """y = x . weight^T (+ bias). A row of y depends on its row of x alone, bit for bit.

    The float32 format multiplies x as it is, bfloat16 rounds x to bfloat16, and the int formats quantise x to int8 per
    row and group of 128. Sums are float32 (exact integers within a group).

    Args:
        x: f32 or bf16 [M, K].
        bias: f32[N].
        out_dtype: float32 or bfloat16; None is x's dtype.

    Returns:
        y [M, N].

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype not in (paddle.float32, paddle.bfloat16):
        raise ValueError(f"out_dtype: expected float32 or bfloat16, got {dtype}")
    inputs = (x, packed.data, bias)
    (y,) = shim.run("linear", *inputs, packed.out_features, format_code(packed.format), dtype == paddle.float32)
    return y
