"""Cases of rope_store_latent_, of attention over latent vectors, and of head_linear, which makes and reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops import linear as linear_ops
from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.kv_cache import KvCache, Rotary, kv_cache_shapes
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.reference import linear as linear_reference
from fastdeploy_sd.ops.rope_table import rope_table
from tests.ops.cases.attention import (
    DECODE,
    DTYPES,
    MIXED,
    PREFILL,
    VERIFY,
    batch,
    select,
    shared_batches,
    without_first_keys,
)
from tests.ops.cases.case import OpCases
from tests.ops.expert_model import pack_experts

BLOCKS = 4
# tokens, heads, head size, rotary size, block size, interleaved
STORES = [(0, 2, 16, 16, 16, False), (1, 4, 48, 16, 16, True), (23, 3, 576, 64, 64, True), (9, 1, 80, 26, 32, False)]
# Query heads, one KV head, head size, block size: groups that are whole tiles, parts of one, and several.
SHAPES = [
    ([], (2, 1, 16, 16)),
    (DECODE, (4, 1, 48, 16)),
    (VERIFY, (128, 1, 576, 64)),
    (DECODE[-3:], (96, 1, 64, 16)),
    (PREFILL, (67, 1, 32, 16)),
    (MIXED, (16, 1, 576, 32)),
]


def as_latents(args: dict[str, Any]) -> dict[str, Any]:
    """The same call over keys that are the values too."""
    return {**args, "cache": replace(args["cache"], v=None)}


def attention_inputs() -> dict[str, dict[str, Any]]:
    """Ragged batches, hidden first keys, and requests that begin with the same blocks."""
    found = {}
    for dtype in DTYPES:
        for i, (requests, geometry) in enumerate(SHAPES):
            args = batch(requests, *geometry, dtype)
            found[f"{i}-{np.dtype(dtype)}-{geometry[0]}x{geometry[2]}"] = as_latents(args)
        hidden = without_first_keys(batch(VERIFY, 4, 1, 48, 16, dtype), 2)
        found[f"first-key-{np.dtype(dtype)}"] = as_latents(hidden)
        of_one_head = {name: args for name, args in shared_batches(dtype).items() if args["cache"].num_kv_heads == 1}
        found |= {f"shared-{name}-{np.dtype(dtype)}": as_latents(args) for name, args in of_one_head.items()}
    return found


def store_inputs() -> dict[str, dict[str, Any]]:
    """Both pairings, partial rotary sizes, slots of -1."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, Any]] = {}
    for tokens, heads, head_dim, rotary_dim, block_size, interleaved in STORES:
        for dtype in DTYPES:
            slots = rng.permutation(BLOCKS * block_size)[:tokens].astype(np.int64)
            slots[1:2] = -1
            shape, _ = kv_cache_shapes(BLOCKS, block_size, 1, head_dim, np.dtype(dtype).itemsize)
            found[f"{np.dtype(dtype)}-{tokens}x{heads}x{head_dim}"] = {
                "heads": narrow(rng.standard_normal((tokens, heads * head_dim), np.float32), dtype),
                "latents": narrow(rng.standard_normal((tokens, head_dim), np.float32), dtype),
                "cache": KvCache(narrow(rng.standard_normal(shape, np.float32), dtype), None),
                "positions": rng.integers(0, 3000, tokens, np.int32),
                "slot_mapping": slots,
                "rotary": Rotary(rope_table(3000, rotary_dim, 10000.0), interleaved),
            }
    return found


def head_inputs() -> dict[str, dict[str, Any]]:
    """No token, one, more than a task has; nothing after the multiplied elements, or something that passes or not."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, Any]] = {}
    for tokens, heads, rest, inner, outer in (
        (0, 2, 0, 16, 16),
        (1, 3, 4, 32, 48),
        (7, 5, 16, 33, 40),
        (120, 2, 0, 64, 31),
    ):
        for dtype, fmt in ((np.float32, "float32"), (np.uint16, "bfloat16")):
            for passes in (False, True):
                found[f"{fmt}-{tokens}x{heads}-{rest}-{inner}-{outer}-{passes}"] = {
                    "x": narrow(rng.standard_normal((tokens, heads * (inner + rest)), np.float32), dtype),
                    "weights": (rng.standard_normal((heads, outer, inner)) / np.sqrt(inner)).astype(np.float32),
                    "fmt": fmt,
                    "num_rest": rest,
                    "passes": passes,
                }
    return found


def head_linear(x: Any, weights: Any, fmt: LinearFormat, num_rest: int, *, passes: bool) -> Any:
    return linear_ops.head_linear(x, pack_experts(weights, fmt), num_rest, passes=passes)


CASCADE_APPEND_ATTENTION_LATENT = OpCases(
    "cascade_append_attention over latents",
    ops.cascade_append_attention,
    reference.cascade_append_attention,
    attention_inputs(),
    ops.CASCADE_APPEND_ATTENTION,
    take=select,
    rtol=2e-5,
    atol=4e-5,
    bf16_atol=2.0**-7,
)
ROPE_STORE_LATENT = OpCases(
    "rope_store_latent",
    ops.rope_store_latent_,
    reference.rope_store_latent_,
    store_inputs(),
    ops.ROPE_STORE_LATENT,
    rtol=2e-6,
    atol=1e-6,
)
HEAD_LINEAR = OpCases(
    "head_linear",
    head_linear,
    linear_reference.head_linear,
    head_inputs(),
    linear_ops.HEAD_LINEAR,
    on_host=("weights",),
    atol=1e-5,
)
