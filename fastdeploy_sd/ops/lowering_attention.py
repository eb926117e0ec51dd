"""What recorded calls of rope_store_kv_ and cascade_append_attention become; see ops/lowering.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fastdeploy_sd.ops.kv_cache import kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.native.attention import CascadeAppendAttentionParams, KvCacheParams, RopeStoreKvParams
from fastdeploy_sd.ops.recorder import CallBuilder, Dim, Outputs

# Codes of fdsd::KvDType.
_KV_DTYPE_CODES = {paddle.float32: 0, paddle.bfloat16: 1, paddle.int8: 2}


def _cache_params(call: CallBuilder, kv: Sequence[Any], activations: paddle.dtype) -> KvCacheParams:
    """The cache (k, v, k_scale, v_scale) is a constant: recorded once, written by every run."""
    k, v, k_scale, v_scale = kv
    if k.dtype not in _KV_DTYPE_CODES or len(k.shape) != 5:  # noqa: PLR2004
        raise call.error("k_cache", "float32, bfloat16 or int8 in 5 dimensions", f"{k.dtype}{list(k.shape)}")
    has_scales = k.dtype == paddle.int8
    if (k_scale is not None, v_scale is not None) != (has_scales, has_scales):
        raise call.error("k_scale, v_scale", "both for int8 and neither else", k.dtype)
    num_blocks, num_kv_heads, parts, block_size, s = k.shape
    geometry = (num_blocks, block_size, num_kv_heads)
    k_shape, v_shape = kv_cache_shapes(*geometry, parts * s, 4 // s)
    scales = kv_scale_shape(*geometry)
    return KvCacheParams(
        *geometry,
        parts * s,
        call.dtype_code("activations", activations),
        _KV_DTYPE_CODES[k.dtype],
        call.data("k_cache", k, k.dtype, k_shape),
        call.data("v_cache", v, k.dtype, v_shape),
        call.optional("k_scale", k_scale, paddle.float32, scales),
        call.optional("v_scale", v_scale, paddle.float32, scales),
    )


def _num_heads(call: CallBuilder, name: str, width: int, cache: KvCacheParams, extra: int) -> int:
    """Heads in `width` columns that have `extra` heads beside them."""
    if width % cache.head_dim != 0 or width // cache.head_dim <= extra:
        raise call.error(name, f"[T, heads * {cache.head_dim}]", f"{width} columns")
    return int(width // cache.head_dim - extra)


def rope_store_kv(call: CallBuilder, *args: Any) -> Outputs:
    """Lower rope_store_kv_."""
    qkv, positions, slot_mapping, cos_sin, *kv, q_norm, k_norm, eps, interleaved = args
    rows, width = call.matrix("qkv", qkv)
    cache = _cache_params(call, kv, qkv.dtype)
    num_heads = _num_heads(call, "qkv", width, cache, 2 * cache.num_kv_heads)
    max_position, rotary_dim = call.matrix("cos_sin", cos_sin)
    q = call.output(qkv.dtype, (rows, num_heads * cache.head_dim))
    call.emit(
        "rope_store_kv",
        RopeStoreKvParams,
        cache=cache,
        num_tokens=rows,
        num_heads=num_heads,
        rotary_dim=rotary_dim,
        max_position=max_position,
        interleaved=int(interleaved),
        norm_eps=eps,
        qkv=call.data("qkv", qkv, qkv.dtype, (rows, width)),
        positions=call.data("positions", positions, paddle.int32, (rows,)),
        slot_mapping=call.data("slot_mapping", slot_mapping, paddle.int64, (rows,)),
        cos_sin=call.data("cos_sin", cos_sin, paddle.float32, (max_position, rotary_dim)),
        q_norm=call.optional("q_norm", q_norm, paddle.float32, (cache.head_dim,)),
        k_norm=call.optional("k_norm", k_norm, paddle.float32, (cache.head_dim,)),
        q=q,
    )
    return (q,)


def cascade_append_attention(call: CallBuilder, *args: Any) -> Outputs:
    """Lower cascade_append_attention."""
    q, *kv, query_start_loc, seq_lens, block_tables, scale, first_key = args
    rows, width = call.matrix("q", q)
    cache = _cache_params(call, kv, q.dtype)
    requests: Dim = block_tables.shape[0]
    max_blocks: Dim = block_tables.shape[1]
    y = call.output(q.dtype, (rows, width))
    call.emit(
        "cascade_append_attention",
        CascadeAppendAttentionParams,
        cache=cache,
        num_requests=requests,
        num_tokens=rows,
        num_heads=_num_heads(call, "q", width, cache, 0),
        max_blocks=max_blocks,
        scale=scale,
        first_key=first_key,
        q=call.data("q", q, q.dtype, (rows, width)),
        query_start_loc=call.data("query_start_loc", query_start_loc, paddle.int32, (requests + 1,)),
        seq_lens=call.data("seq_lens", seq_lens, paddle.int32, (requests,)),
        block_tables=call.data("block_tables", block_tables, paddle.int32, (requests, max_blocks)),
        y=y,
    )
    return (y,)
