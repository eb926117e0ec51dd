"""What a recorded op call becomes: its params struct, with the checks that the Paddle binding of the op makes.

A function here takes what the op's wrapper hands to `shim.run`, input tensors (symbolic or constant) and attributes,
and returns the outputs. An op without a function cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle

from fastdeploy_sd.ops.lowering_attention import cascade_append_attention, rope_store_kv
from fastdeploy_sd.ops.lowering_mtp import mtp_postprocess, mtp_preprocess
from fastdeploy_sd.ops.native.activation import SwigluParams
from fastdeploy_sd.ops.native.batch import GatherOutputRowsParams
from fastdeploy_sd.ops.native.cast import CastParams
from fastdeploy_sd.ops.native.linear import LinearParams, packed_bytes
from fastdeploy_sd.ops.native.moe import MoeFfnParams
from fastdeploy_sd.ops.native.norm import ConcatRmsNormParams, RmsNormParams
from fastdeploy_sd.ops.recorder import ELEMENT_BYTES, CallBuilder, Lowering, Outputs, Size
from fastdeploy_sd.ops.reference.linear import LINEAR_FORMATS


def _rms_norm(call: CallBuilder, x: Any, weight: Any, residual: Any, eps: float) -> Outputs:
    rows, hidden = call.matrix("x", x)
    y = call.output(x.dtype, (rows, hidden))
    residual_out = call.output(paddle.float32, (rows, hidden))
    call.emit(
        "rms_norm",
        RmsNormParams,
        num_rows=rows,
        hidden_size=hidden,
        dtype=call.dtype_code("x", x.dtype),
        eps=eps,
        x=call.data("x", x, x.dtype, (rows, hidden)),
        residual=call.optional("residual", residual, paddle.float32, (rows, hidden)),
        weight=call.data("weight", weight, paddle.float32, (hidden,)),
        y=y,
        residual_out=residual_out,
    )
    return y, residual_out


def _concat_rms_norm(call: CallBuilder, *args: Any) -> Outputs:
    first, second, first_weight, second_weight, eps = args
    rows, hidden = call.matrix("first", first)
    y = call.output(first.dtype, (rows, 2 * hidden))
    call.emit(
        "concat_rms_norm",
        ConcatRmsNormParams,
        num_rows=rows,
        hidden_size=hidden,
        dtype=call.dtype_code("first", first.dtype),
        eps=eps,
        first=call.data("first", first, first.dtype, (rows, hidden)),
        second=call.data("second", second, first.dtype, (rows, hidden)),
        first_weight=call.data("first_weight", first_weight, paddle.float32, (hidden,)),
        second_weight=call.data("second_weight", second_weight, paddle.float32, (hidden,)),
        y=y,
    )
    return (y,)


def _cast(call: CallBuilder, x: Any, float32_out: bool) -> Outputs:
    rows, columns = call.matrix("x", x)
    y_dtype = paddle.float32 if float32_out else paddle.bfloat16
    y = call.output(y_dtype, (rows, columns))
    call.emit(
        "cast",
        CastParams,
        num_rows=rows,
        num_columns=columns,
        x_dtype=call.dtype_code("x", x.dtype),
        y_dtype=call.dtype_code("y", y_dtype),
        x=call.data("x", x, x.dtype, (rows, columns)),
        y=y,
    )
    return (y,)


def _swiglu(call: CallBuilder, gate_up: Any) -> Outputs:
    rows, width = call.matrix("gate_up", gate_up)
    if width % 2 != 0:
        raise call.error("gate_up", "[T, 2 * I]", [rows, width])
    y = call.output(gate_up.dtype, (rows, width // 2))
    call.emit(
        "swiglu",
        SwigluParams,
        num_rows=rows,
        intermediate_size=width // 2,
        dtype=call.dtype_code("gate_up", gate_up.dtype),
        gate_up=call.data("gate_up", gate_up, gate_up.dtype, (rows, width)),
        y=y,
    )
    return (y,)


def _linear(call: CallBuilder, *args: Any) -> Outputs:
    x, packed, bias, out_features, format_code, float32_out = args
    rows, in_features = call.matrix("x", x)
    y_dtype = paddle.float32 if float32_out else paddle.bfloat16
    num_bytes = packed_bytes(in_features, out_features, LINEAR_FORMATS[format_code])
    y = call.output(y_dtype, (rows, out_features))
    call.emit(
        "linear",
        LinearParams,
        num_rows=rows,
        in_features=in_features,
        out_features=out_features,
        format=format_code,
        x_dtype=call.dtype_code("x", x.dtype),
        y_dtype=call.dtype_code("y", y_dtype),
        x=call.data("x", x, x.dtype, (rows, in_features)),
        packed=call.data("packed", packed, paddle.uint8, (num_bytes,)),
        bias=call.optional("bias", bias, paddle.float32, (out_features,)),
        y=y,
    )
    return (y,)


def _moe_ffn(call: CallBuilder, *args: Any) -> Outputs:
    x, router_weight, gate_up, down, selection_bias, shared, *attributes = args
    intermediate_size, format_code, top_k, normalize, norm_min = attributes
    rows, hidden = call.matrix("x", x)
    experts, _ = call.matrix("router_weight", router_weight)
    if isinstance(experts, Size):
        raise call.error("router_weight", "a constant", "a tensor of the pass")
    gate_up_bytes = experts * packed_bytes(hidden, 2 * intermediate_size, LINEAR_FORMATS[format_code])
    down_bytes = experts * packed_bytes(intermediate_size, hidden, LINEAR_FORMATS[format_code])
    y = call.output(x.dtype, (rows, hidden))
    call.emit(
        "moe_ffn",
        MoeFfnParams,
        num_tokens=rows,
        hidden_size=hidden,
        intermediate_size=intermediate_size,
        num_experts=experts,
        top_k=top_k,
        normalize=int(normalize),
        norm_min=norm_min,
        dtype=call.dtype_code("x", x.dtype),
        format=format_code,
        x=call.data("x", x, x.dtype, (rows, hidden)),
        router_weight=call.data("router_weight", router_weight, paddle.float32, (experts, hidden)),
        selection_bias=call.optional("selection_bias", selection_bias, paddle.float32, (experts,)),
        gate_up=call.data("gate_up", gate_up, paddle.uint8, (gate_up_bytes,)),
        down=call.data("down", down, paddle.uint8, (down_bytes,)),
        shared=call.optional("shared", shared, x.dtype, (rows, hidden)),
        y=y,
    )
    return (y,)


def _gather_output_rows(call: CallBuilder, x: Any, indices: Any) -> Outputs:
    rows_in, width = call.matrix("x", x)
    (rows_out,) = indices.shape
    y = call.output(x.dtype, (rows_out, width))
    call.emit(
        "gather_output_rows",
        GatherOutputRowsParams,
        num_rows_in=rows_in,
        num_rows_out=rows_out,
        row_bytes=width * ELEMENT_BYTES[x.dtype],
        x=call.data("x", x, x.dtype, (rows_in, width)),
        indices=call.data("indices", indices, paddle.int32, (rows_out,)),
        y=y,
    )
    return (y,)


LOWERINGS: Mapping[str, Lowering] = {
    "rms_norm": _rms_norm,
    "concat_rms_norm": _concat_rms_norm,
    "cast": _cast,
    "swiglu": _swiglu,
    "linear": _linear,
    "moe_ffn": _moe_ffn,
    "gather_output_rows": _gather_output_rows,
    "rope_store_kv": rope_store_kv,
    "cascade_append_attention": cascade_append_attention,
    "mtp_preprocess": mtp_preprocess,
    "mtp_postprocess": mtp_postprocess,
}
