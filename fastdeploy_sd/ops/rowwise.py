"""Ops on single rows: norms, concat_columns, swiglu, geglu, add_silu, bias_gelu, sigmoid_gate, softcap and cast."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.device_tensor import dtype_name
from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, Attr, DTypeOf, In, Out, Value, each
from fastdeploy_sd.device.program.op import A, Op

RMS_NORM = Op(
    "rms_norm",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, hidden_size"),
    residual=In(F32, "num_rows, hidden_size", optional=True),
    weight=In(F32, "hidden_size"),
    eps=Attr(float),
    x_scale=Attr(float),
    dtype=DTypeOf("x"),
    y=Out("x", "num_rows, hidden_size"),
    residual_out=Out(F32, "num_rows, hidden_size"),
)
CONCAT_RMS_NORM = Op(
    "concat_rms_norm",
    "num_rows",
    first=In(ACTIVATIONS, "num_rows, hidden_size"),
    second=In("first", "num_rows, hidden_size"),
    **each(In(F32, "hidden_size"), "first_weight", "second_weight"),
    eps=Attr(float),
    dtype=DTypeOf("first"),
    y=Out("first", "num_rows, 2*hidden_size"),
)
CONCAT_COLUMNS = Op(
    "concat_columns",
    "num_rows",
    first=In(ACTIVATIONS, "num_rows, first_columns"),
    second=In("first", "num_rows, second_columns"),
    first_bytes=Value("first_columns*itemsize(first)"),
    second_bytes=Value("second_columns*itemsize(first)"),
    y=Out("first", "num_rows, first_columns+second_columns"),
)
SWIGLU, GEGLU = (
    Op(
        name,
        "num_rows",
        gate_up=In(ACTIVATIONS, "num_rows, 2*intermediate_size"),
        dtype=DTypeOf("gate_up"),
        y=Out("gate_up", "num_rows, intermediate_size"),
    )
    for name in ("swiglu", "geglu")
)
ADD_SILU = Op(
    "add_silu",
    "num_rows",
    residual=In(ACTIVATIONS, "num_rows, num_columns"),
    x=In("residual", "num_rows, num_columns"),
    dtype=DTypeOf("residual"),
    y=Out("residual", "num_rows, num_columns"),
)
BIAS_GELU = Op(
    "bias_gelu",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, num_columns"),
    bias=In(F32, "num_columns"),
    dtype=DTypeOf("x"),
    y=Out("x", "num_rows, num_columns"),
)
SIGMOID_GATE = Op(
    "sigmoid_gate",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, num_columns"),
    gate=In("x", "num_rows, num_gates"),
    dtype=DTypeOf("x"),
    y=Out("x", "num_rows, num_columns"),
)
SOFTCAP = Op(
    "softcap",
    "num_rows",
    x=In(F32, "num_rows, num_columns"),
    cap=Attr(float),
    y=Out(F32, "num_rows, num_columns"),
)
CAST = Op(
    "cast",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, num_columns"),
    x_dtype=DTypeOf("x"),
    y_dtype=Attr(ACTIVATIONS),
    y=Out("y_dtype", "num_rows, num_columns"),
)


def rms_norm(x: A, weight: A, eps: float, residual: A | None = None, x_scale: float = 1.0) -> tuple[A, A]:
    """Add the residual stream f32[T, H] and normalise: h = x * x_scale (+ residual), y = h / rms(h) * weight.

    Returns:
        y in x's dtype [T, H] and h, f32[T, H]: the residual stream stays in float32.
    """
    y, h = RMS_NORM(x=x, residual=residual, weight=weight, eps=eps, x_scale=x_scale)
    return y, h


def concat_rms_norm(first: A, second: A, first_weight: A, second_weight: A, eps: float) -> A:
    """Normalise two matrices [T, H] apart and put them side by side, [T, 2 * H]: a draft layer's input."""
    weights = {"first_weight": first_weight, "second_weight": second_weight}
    y: A = CONCAT_RMS_NORM(first=first, second=second, **weights, eps=eps)
    return y


def concat_columns(first: A, second: A) -> A:
    """Put two matrices [T, N] and [T, M] side by side, [T, N + M]; f32, bf16 or f16."""
    y: A = CONCAT_COLUMNS(first=first, second=second)
    return y


def swiglu(gate_up: A) -> A:
    """Gate a feed-forward network: y = silu(gate) * up, where a row is [gate | up]. Computed in float32.

    gate_up is f32, bf16 or f16 [T, 2 * I]; y has the same dtype, [T, I].
    """
    y: A = SWIGLU(gate_up=gate_up)
    return y


def geglu(gate_up: A) -> A:
    """Gate a feed-forward network: y = gelu(gate) * up, where gelu is approximated by tanh; else as `swiglu`."""
    y: A = GEGLU(gate_up=gate_up)
    return y


def add_silu(residual: A, x: A) -> A:
    """Return residual + silu(x), both f32, bf16 or f16 [T, N]. Computed in float32."""
    y: A = ADD_SILU(residual=residual, x=x)
    return y


def bias_gelu(x: A, bias: A) -> A:
    """Return gelu(x + bias), x f32, bf16 or f16 [T, N] and bias f32[N]. Computed in float32."""
    y: A = BIAS_GELU(x=x, bias=bias)
    return y


def sigmoid_gate(x: A, gate: A) -> A:
    """Return x * sigmoid(gate), x f32, bf16 or f16 [T, N] and gate the same dtype [T, G]. Computed in float32.

    G divides N, and gate g is for the columns from g * N / G on, N / G of them.
    """
    y: A = SIGMOID_GATE(x=x, gate=gate)
    return y


def softcap(x: A, cap: float) -> A:
    """Return cap * tanh(x / cap), for x f32[T, N] the same shape: values between -cap and cap in the same order."""
    y: A = SOFTCAP(x=x, cap=cap)
    return y


def cast(x: Any, dtype: Any) -> Any:
    """Return x in another dtype; bfloat16 and float16 are rounded to nearest, ties to even.

    x is f32, bf16 or f16 [T, N]; it is returned itself when it has the dtype already. The dtype is of the library that
    x is an array of.
    """
    return x if x.dtype == dtype else CAST(x=x, y_dtype=dtype_name(dtype))
