"""rope_store_kv_ and cascade_append_attention on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, Rotary, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, dtype_code, pointer
from fastdeploy_sd.types import F32, I32, I64

NUM_KEY_DIMS = 5
# Codes of fdsd::KvDType.
KV_DTYPE_CODES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.int8): 2}


class KvCacheParams(ctypes.Structure):
    """Twin of fdsd::KvCache."""

    _fields_ = (
        ("num_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
    )


class RopeStoreKvParams(CParams):
    """Twin of fdsd::RopeStoreKvParams."""

    _fields_ = (
        ("cache", KvCacheParams),
        ("num_tokens", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("max_position", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("qkv", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
    )


class CascadeAppendAttentionParams(CParams):
    """Twin of fdsd::CascadeAppendAttentionParams."""

    _fields_ = (
        ("cache", KvCacheParams),
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("first_key", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


def _cache_params(cache: KvCache[Array], activations: Array) -> KvCacheParams:
    kv_dtype = cache.k.dtype
    if kv_dtype not in KV_DTYPE_CODES:
        raise ValueError(f"cache.k: expected float32, bfloat16 bits (uint16) or int8, got {kv_dtype}")
    if cache.k.ndim != NUM_KEY_DIMS:
        raise ValueError(f"cache.k: expected {NUM_KEY_DIMS} dimensions, got {list(cache.k.shape)}")
    geometry = (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim)
    k_shape, v_shape = kv_cache_shapes(*geometry, kv_dtype.itemsize)
    scale_shape = kv_scale_shape(*geometry[:3])
    has_scales = kv_dtype == np.int8
    if (cache.k_scale is not None, cache.v_scale is not None) != (has_scales, has_scales):
        raise ValueError(f"cache.k_scale, cache.v_scale: expected both for int8 and neither else, got {kv_dtype}")
    return KvCacheParams(
        *geometry,
        dtype_code("activations", activations),
        KV_DTYPE_CODES[kv_dtype],
        pointer("cache.k", cache.k, k_shape, kv_dtype),
        pointer("cache.v", cache.v, v_shape, kv_dtype),
        pointer("cache.k_scale", cache.k_scale, scale_shape, np.float32),
        pointer("cache.v_scale", cache.v_scale, scale_shape, np.float32),
    )


def _num_heads(name: str, width: int, num_kv_heads: int, head_dim: int) -> int:
    if width <= 0 or width % head_dim != 0:
        raise ValueError(
            f"{name}: expected whole heads of {head_dim} beside {num_kv_heads} KV heads, got width {width}"
        )
    return width // head_dim


def rope_store_kv_(
    qkv: Array,
    cache: KvCache[Array],
    positions: I32,
    slot_mapping: I64,
    rotary: Rotary[F32],
    qk_norm: QkNorm[F32] | None = None,
) -> Array:
    """See `reference.attention.rope_store_kv_`.

    Raises:
        ValueError: a shape or dtype disagrees, a position is outside the table or a slot outside the cache; nothing is
            written then.
    """
    tokens, width = qkv.shape
    max_position, rotary_dim = rotary.cos_sin.shape
    head_dim, kv_heads = cache.head_dim, cache.num_kv_heads
    heads = _num_heads("qkv", width - 2 * kv_heads * head_dim, kv_heads, head_dim)
    q = np.empty((tokens, heads * head_dim), qkv.dtype)
    params = RopeStoreKvParams(
        _cache_params(cache, qkv),
        tokens,
        heads,
        rotary_dim,
        max_position,
        int(rotary.interleaved),
        0.0 if qk_norm is None else qk_norm.eps,
        pointer("qkv", qkv, (tokens, width), qkv.dtype),
        pointer("positions", positions, (tokens,), np.int32),
        pointer("slot_mapping", slot_mapping, (tokens,), np.int64),
        pointer("rotary.cos_sin", rotary.cos_sin, (max_position, rotary_dim), np.float32),
        pointer("qk_norm.q", None if qk_norm is None else qk_norm.q, (head_dim,), np.float32),
        pointer("qk_norm.k", None if qk_norm is None else qk_norm.k, (head_dim,), np.float32),
        pointer("q", q, q.shape, q.dtype),
    )
    call("rope_store_kv", params)
    return q


def cascade_append_attention(
    q: Array, cache: KvCache[Array], query_start_loc: I32, seq_lens: I32, block_tables: I32, scale: float
) -> Array:
    """See `reference.attention.cascade_append_attention`.

    Raises:
        ValueError: a shape or dtype disagrees, offsets or lengths contradict each other, a block is outside the cache,
            or cache.first_key is not in 0..63.
    """
    tokens, width = q.shape
    requests, max_blocks = block_tables.shape
    y = np.empty_like(q)
    params = CascadeAppendAttentionParams(
        _cache_params(cache, q),
        requests,
        tokens,
        _num_heads("q", width, cache.num_kv_heads, cache.head_dim),
        max_blocks,
        scale,
        cache.first_key,
        pointer("q", q, (tokens, width), q.dtype),
        pointer("query_start_loc", query_start_loc, (requests + 1,), np.int32),
        pointer("seq_lens", seq_lens, (requests,), np.int32),
        pointer("block_tables", block_tables, (requests, max_blocks), np.int32),
        pointer("y", y, y.shape, y.dtype),
    )
    call("cascade_append_attention", params)
    return y
