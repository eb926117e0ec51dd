"""Cases of both attention ops over an int8 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.reference.kv_quantize import quantize_heads
from fastdeploy_sd.ops.rope_table import rope_table
from fastdeploy_sd.types import F32
from tests.ops.cases.attention import FIRST_KEYS, SHAPES, WINDOWS, batch, own_blocks, select, shared_batches, windowed
from tests.ops.cases.case import OpCases

BLOCKS = 4
# tokens, query heads, KV heads, head size, block size
STORES = [(0, 2, 1, 16, 16), (1, 16, 8, 128, 64), (5, 8, 2, 48, 32), (41, 6, 3, 80, 64), (33, 4, 4, 256, 16)]


# f32[..., D] -> elements of a byte, f32[...] scales.
Quantize = Callable[[F32], tuple[np.ndarray, F32]]


def copied(cache: KvCache[np.ndarray], copy: Callable[[np.ndarray], Any] = np.copy) -> KvCache[Any]:
    """The cache with every array of it copied."""
    assert cache.v is not None
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    return KvCache(copy(cache.k), copy(cache.v), cache.first_key, copy(cache.k_scale), copy(cache.v_scale))


def quantized(args: dict[str, Any], first_key: int = 0, quantize: Quantize = quantize_heads) -> dict[str, Any]:
    """The same call over a cache of bytes. Slots that hold no token get scales of NaN and elements of any kind."""
    rng = np.random.default_rng(7)
    parts = []
    for heads in (widen(reference.unpack_k(args["cache"].k)), widen(reference.unpack_v(args["cache"].v))):
        integers, scales = quantize(heads)
        noise = rng.integers(-128, 128, integers.shape, np.int8).view(integers.dtype)
        integers = np.where(np.isnan(scales)[..., None], noise, integers)
        parts.append((integers, np.ascontiguousarray(scales.transpose(0, 2, 1))))
    (k, k_scale), (v, v_scale) = parts
    cache = KvCache(reference.pack_k(k), reference.pack_v(v), first_key, k_scale, v_scale)
    return {**args, "cache": without_first_scales(args, cache)}


def blunt(args: dict[str, Any]) -> dict[str, Any]:
    """The same call with all query rows of one size: where one key takes nearly all, rounding it says little."""
    q = widen(args["q"])
    q[::3] /= 8.0
    return {**args, "q": narrow(q, args["q"].dtype)}


def without_first_scales(args: dict[str, Any], cache: KvCache[np.ndarray]) -> KvCache[np.ndarray]:
    """Scales of keys before first_key that no row of their own position reads become NaN."""
    new = copied(cache)
    assert new.k_scale is not None
    assert new.v_scale is not None
    for r, num_rows in enumerate(np.diff(args["query_start_loc"])):
        for position in range(min(cache.first_key, int(args["seq_lens"][r] - num_rows))):
            block, offset = divmod(position, cache.block_size)
            new.k_scale[own_blocks(args, r)[block], :, offset] = np.nan
            new.v_scale[own_blocks(args, r)[block], :, offset] = np.nan
    return new


def attention_inputs() -> dict[str, dict[str, Any]]:
    """The ragged batches of the other types, for both types of activations, hidden first keys and shared blocks."""
    found = {}
    for i, (requests, geometry) in enumerate(SHAPES):
        for dtype in (np.float32, np.uint16):
            name = f"{i}-{np.dtype(dtype)}-{geometry[0]}:{geometry[1]}x{geometry[2]}-block{geometry[3]}"
            found[name] = quantized(blunt(batch(requests, *geometry, dtype)))
        first_key = FIRST_KEYS[i % len(FIRST_KEYS)]
        args = blunt(batch(requests, *geometry, np.float32))
        found[f"{i}-first-key-{first_key}"] = quantized(args, first_key)
        if first_key in WINDOWS:
            found[f"{i}-window-{first_key}"] = windowed(quantized(args), first_key)
    found |= {f"shared-{name}": quantized(blunt(args)) for name, args in shared_batches(np.float32).items()}
    return found


def store_inputs(element: Any = np.int8) -> dict[str, dict[str, Any]]:
    """Heads whose integers are known exactly: at position 0 nothing turns. Some have no scale."""
    rng = np.random.default_rng(0)
    found = {}
    for tokens, heads, kv_heads, head_dim, block_size in STORES:
        for dtype in (np.float32, np.uint16):
            qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim), np.float32)
            # Behind the elements that the rotary embedding multiplies by 1 and by 0.
            for token, value in enumerate((3e38, np.inf, np.nan)[:tokens]):
                qkv[token, heads::kv_heads, head_dim - 1] = value
            for token, value in enumerate((0.0, 1e-31)[: tokens - 3], 3):
                qkv[token, heads::kv_heads] = value
            slots = rng.permutation(BLOCKS * block_size)[:tokens].astype(np.int64)
            slots[6:7] = -1
            shapes = kv_cache_shapes(BLOCKS, block_size, kv_heads, head_dim, 1)
            k, v = (rng.integers(-127, 128, shape, np.int8).view(element) for shape in shapes)
            k_scale, v_scale = rng.random((2, *kv_scale_shape(BLOCKS, block_size, kv_heads)), np.float32)
            found[f"{np.dtype(dtype)}-{tokens}x{heads}:{kv_heads}x{head_dim}"] = {
                "qkv": narrow(qkv.reshape(tokens, (heads + 2 * kv_heads) * head_dim), dtype),
                "cache": KvCache(k, v, 0, k_scale, v_scale),
                "positions": np.zeros(tokens, np.int32),
                "slot_mapping": slots,
                "rotary": Rotary(rope_table(8, head_dim // 2, 10000.0)),
            }
    return found


# Query vectors are rounded to 127ths of their largest element and weights to 254ths of the largest of 64: each about
# 0.3 % of an output of size 1, a little more in sums of few values. Whether it is this error and no other is tested in
# test_attention_int8.py.
CASCADE_APPEND_ATTENTION_INT8 = OpCases(
    "cascade_append_attention over int8",
    ops.cascade_append_attention,
    reference.cascade_append_attention,
    attention_inputs(),
    ops.CASCADE_APPEND_ATTENTION,
    take=select,
    rtol=0.0,
    atol=0.04,
)
ROPE_STORE_KV_INT8 = OpCases(
    "rope_store_kv to int8",
    ops.rope_store_kv_,
    reference.rope_store_kv_,
    store_inputs(),
    ops.ROPE_STORE_KV,
    rtol=2e-6,
    atol=1e-37,
)
