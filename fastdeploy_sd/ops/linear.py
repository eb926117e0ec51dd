"""linear and head_linear: products with packed weight matrices, and what reads parts of one or of its inputs."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.device_tensor import dtype_name
from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, U8, Attr, DTypeOf, In, Out
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.linear_format import format_code
from fastdeploy_sd.ops.packing import PackedExperts, PackedLinear

LINEAR = Op(
    "linear",
    "num_rows",
    in_features=Attr(int),
    out_features=Attr(int),
    x=In(ACTIVATIONS, "num_rows, in_features"),
    format=Attr(int),
    num_slices=Attr(int),
    slice_unit=Attr(int),
    packed=In(U8, "packed_linear_bytes(in_features, out_features, format, num_slices, slice_unit)"),
    bias=In(F32, "out_features", optional=True),
    x_dtype=DTypeOf("x"),
    y_dtype=Attr(ACTIVATIONS),
    y=Out("y_dtype", "num_rows, out_features"),
)
HEAD_LINEAR = Op(
    "head_linear",
    "num_tokens",
    in_features=Attr(int),
    out_features=Attr(int),
    num_heads=Attr(int),
    num_rest=Attr(int),
    passes=Attr(bool),
    format=Attr(int),
    x=In(ACTIVATIONS, "num_tokens, num_heads*(in_features + num_rest)"),
    packed=In(U8, "num_heads*packed_linear_bytes(in_features, out_features, format, 1, 1)"),
    dtype=DTypeOf("x"),
    y=Out("x", "num_tokens, num_heads*(out_features + passes*num_rest)"),
)
GATHER_WEIGHT_ROWS = Op(
    "gather_weight_rows",
    "num_rows_out",
    in_features=Attr(int),
    out_features=Attr(int),
    format=Attr(int),
    packed=In(U8, "packed_linear_bytes(in_features, out_features, format, 1, 1)"),
    indices=In(I32, "num_rows_out"),
    y_dtype=Attr(ACTIVATIONS),
    y=Out("y_dtype", "num_rows_out, in_features"),
)
GATHER_COLUMNS = Op(
    "gather_columns",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, num_columns"),
    columns=In(I32, "num_gathered"),
    dtype=DTypeOf("x"),
    y=Out("x", "num_rows, num_gathered"),
)


def linear(x: A, packed: PackedLinear[A], bias: A | None = None, out_dtype: Any = None) -> A:
    """y [M, N] = x [M, K] . weight^T (+ bias f32[N]), in out_dtype or x's dtype. A row depends on its row of x alone.

    The float32 format multiplies x as it is; bfloat16 and float16 round x to their own type. The int formats quantise x
    to int8, and fp8 to e4m3, per row and group of 128; e4m3 rounds x to bfloat16. Only GPUs multiply fp8 and float16.
    Sums are float32 (exact integers within a group of the int formats); those of packed.slices are added in a tree.
    `packed.order` says which columns of x the matrix multiplies.
    """
    y: A = LINEAR(
        x=x if packed.order is None else gather_columns(x, packed.order),
        packed=packed.data,
        bias=bias,
        in_features=packed.in_features,
        out_features=packed.out_features,
        format=format_code(packed.format),
        num_slices=packed.slices.count,
        slice_unit=packed.slices.unit,
        y_dtype=dtype_name(x.dtype if out_dtype is None else out_dtype),
    )
    return y


def head_linear(x: A, packed: PackedExperts[A], num_rest: int, *, passes: bool) -> A:
    """y[:, h] = x[:, h] . weight[h]^T for each head h. A row depends on its row of x alone.

    Args:
        x: f32, bf16 or f16 [T, heads * (K + num_rest)].
        packed: of each head a matrix [N, K].
        num_rest: elements at the end of each head of x that are not multiplied.
        passes: they follow the products in y; else they are left out.

    Returns:
        The same dtype, [T, heads * N], or with what passes [T, heads * (N + num_rest)].
    """
    y: A = HEAD_LINEAR(
        x=x,
        packed=packed.data,
        num_heads=packed.num_experts,
        in_features=packed.in_features,
        out_features=packed.out_features,
        format=format_code(packed.format),
        num_rest=num_rest,
        passes=passes,
    )
    return y


def gather_columns(x: A, columns: Any) -> A:
    """Return columns i32[n] of x [M, K], zeros where a column is -1."""
    y: A = GATHER_COLUMNS(x=x, columns=columns)
    return y


def gather_weight_rows(packed: PackedLinear[A], indices: Any, dtype: str) -> A:
    """Return rows i32[n] of a packed matrix of integers as numbers, [n, K]; `dtype` is "float32" or "bfloat16"."""
    y: A = GATHER_WEIGHT_ROWS(
        packed=packed.data,
        indices=indices,
        in_features=packed.in_features,
        out_features=packed.out_features,
        format=format_code(packed.format),
        y_dtype=dtype,
    )
    return y
