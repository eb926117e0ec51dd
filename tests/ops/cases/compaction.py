"""Cases of compact_kv_ and compact_rows_: all that is there is compared, so that a move elsewhere shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops import compaction as ops
from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.kv_cache import KvCache, VerifiedPaths, kv_cache_shapes, kv_scale_shape
from fastdeploy_sd.ops.reference import compaction as reference
from fastdeploy_sd.types import I32
from tests.ops.cases.case import OpCases
from tests.ops.cases.sampling import offsets

BLOCKS, BLOCK_SIZE = 12, 16


def random_paths(rng: np.random.Generator, num_requests: int) -> tuple[VerifiedPaths[I32], int]:
    """Prompts' parts, failed rows, chains and trees; the number of the step's tokens."""
    num_rows = rng.integers(0, 12, num_requests)
    num_before = rng.integers(0, 4, num_requests)
    rows = [np.sort(rng.permutation(n)[: rng.integers(0, n + 1)]) for n in num_rows]
    for own in rows[1::3]:
        own[:] = np.arange(len(own))
    cu_num_logits = offsets(num_rows)
    indices = [np.arange(n) + before for n, before in zip(num_rows, num_before, strict=True)]
    begins = offsets(num_rows + num_before)
    return (
        VerifiedPaths(
            cu_num_logits,
            offsets(np.array([len(own) for own in rows], np.int32)),
            _padded([own + begin for own, begin in zip(rows, cu_num_logits, strict=False)], int(cu_num_logits[-1])),
            _padded([own + begin for own, begin in zip(indices, begins, strict=False)], int(cu_num_logits[-1])),
        ),
        int(begins[-1]),
    )


def _padded(parts: list[np.ndarray], length: int) -> np.ndarray:
    found = np.full(length, 1 << 30, np.int32)
    values = np.concatenate([np.zeros(0, np.int64), *parts])
    found[: len(values)] = values
    return found


def moved_kv() -> dict[str, dict[str, Any]]:
    """Every type of elements, scales included; tokens anywhere in the cache; no request."""
    rng = np.random.default_rng(0)
    found = {}
    for dtype in (np.float32, np.uint16, np.int8):
        for num_requests, heads, head_dim in ((0, 1, 16), (3, 1, 16), (9, 3, 80), (17, 2, 128)):
            paths, num_tokens = random_paths(rng, num_requests)
            shapes = kv_cache_shapes(BLOCKS, BLOCK_SIZE, heads, head_dim, np.dtype(dtype).itemsize)
            k, v = (narrow(rng.standard_normal(shape, np.float32) * 9, dtype) for shape in shapes)
            scales: list[np.ndarray | None] = [None, None]
            if dtype == np.int8:
                scales = [rng.random(kv_scale_shape(BLOCKS, BLOCK_SIZE, heads), np.float32) for _ in range(2)]
            found[f"{np.dtype(dtype)}-{num_requests}-{heads}x{head_dim}"] = {
                "cache": KvCache(k, v, k_scale=scales[0], v_scale=scales[1]),
                "paths": paths,
                "slot_mapping": rng.permutation(BLOCKS * BLOCK_SIZE)[:num_tokens].astype(np.int64),
            }
    return found


def moved_rows() -> dict[str, dict[str, Any]]:
    """Narrow and wide rows; no column; no request."""
    rng = np.random.default_rng(1)
    found = {}
    for num_requests, width in ((0, 4), (3, 0), (5, 1), (9, 17), (4, 3000)):
        paths, num_tokens = random_paths(rng, num_requests)
        for dtype in (np.float32, np.uint16):
            rows = narrow(rng.standard_normal((num_tokens, width), np.float32), dtype)
            found[f"{np.dtype(dtype)}-{num_requests}x{width}"] = {"rows": rows, "paths": paths}
    return found


COMPACT_KV = OpCases(
    "compact_kv", ops.compact_kv_, reference.compact_kv_, moved_kv(), ops.COMPACT_KV, rtol=0.0, atol=0.0,
    bf16_ulps=0.0,
)  # fmt: skip
COMPACT_ROWS = OpCases(
    "compact_rows", ops.compact_rows_, reference.compact_rows_, moved_rows(), ops.COMPACT_ROWS, rtol=0.0, atol=0.0,
    bf16_ulps=0.0,
)  # fmt: skip
