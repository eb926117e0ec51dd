"""Cases of rope_store_kv_: q and the whole cache, so that a write outside the slots shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, Rotary, kv_cache_shapes
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.rope_table import rope_table
from tests.ops.cases.case import OpCases

BLOCKS = 4
# tokens, query heads, KV heads, head size, rotary size, block size, interleaved, norm; slots in order
SHAPES = [
    (0, 2, 1, 16, 16, 16, False, False, False),
    (1, 1, 1, 16, 16, 16, False, True, False),
    (1, 16, 8, 128, 128, 64, False, True, False),
    (3, 4, 2, 32, 32, 16, True, False, False),
    (5, 8, 2, 48, 20, 32, False, True, False),
    (5, 8, 1, 64, 26, 16, True, True, False),
    (41, 6, 3, 80, 80, 64, True, True, False),
    (33, 4, 4, 256, 256, 16, False, False, False),
    (41, 6, 3, 128, 128, 64, False, True, True),
    (23, 2, 1, 80, 48, 16, True, False, True),
]


def random_norm(rng: np.random.Generator, head_dim: int) -> QkNorm[np.ndarray]:
    q, k = rng.standard_normal((2, head_dim), np.float32)
    return QkNorm(q, k, 1e-6)


def inputs() -> dict[str, dict[str, Any]]:
    """Both pairings, partial rotary sizes (ragged ones too), with and without norm, slots of -1, a zero head.

    Slots in order begin within a line of K, as those of a prompt behind a cached one do; the others lie anywhere.
    """
    rng = np.random.default_rng(0)
    found = {}
    for tokens, heads, kv_heads, head_dim, rotary_dim, block_size, interleaved, norm, in_order in SHAPES:
        for dtype in (np.float32, np.uint16):
            qkv = rng.standard_normal((tokens, (heads + 2 * kv_heads) * head_dim), np.float32) * 2.0
            slots = rng.permutation(BLOCKS * block_size)[:tokens].astype(np.int64)
            if in_order:
                slots = np.arange(3, 3 + tokens)
            if tokens > 2:
                slots[1] = -1
                qkv[2, :head_dim] = 0.0
            shapes = kv_cache_shapes(BLOCKS, block_size, kv_heads, head_dim, np.dtype(dtype).itemsize)
            k, v = (narrow(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
            geometry = f"{tokens}x{heads}:{kv_heads}x{head_dim}-{rotary_dim}"
            name = f"{np.dtype(dtype)}-{geometry}-{interleaved}-{norm}-{in_order}"
            found[name] = {
                "qkv": narrow(qkv, dtype),
                "cache": KvCache(k, v),
                "positions": rng.integers(0, 3000, tokens, np.int32),
                "slot_mapping": slots,
                "rotary": Rotary(rope_table(3000, rotary_dim, 10000.0), interleaved),
                "qk_norm": random_norm(rng, head_dim) if norm else None,
            }
    return found


# The norm is good to about 1e-6: its sum of squares has only positive terms. x cos - y sin can cancel, which leaves
# three roundings of values up to 10 as an absolute error.
ROPE_STORE_KV = OpCases(
    "rope_store_kv",
    ops.rope_store_kv_,
    reference.rope_store_kv_,
    inputs(),
    ops.ROPE_STORE_KV,
    rtol=2e-6,
    atol=1e-6,
)
