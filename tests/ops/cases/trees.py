"""Trees of new tokens, and the chains whose bits their rows must have."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.cases.attention import own_blocks, select


def random_tree(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """i64[num_rows]: what each row sees of a tree whose parents were drawn. Bits of later rows say nothing."""
    masks: list[int] = []
    for row in range(num_rows):
        parent = int(rng.integers(max(0, row - 4), row)) if row > 0 else None
        masks.append(0 if parent is None else masks[parent] | 1 << parent)
    later = [(-1 << row) for row in range(num_rows)]
    return np.array([(mask | extra) & (1 << 64) - 1 for mask, extra in zip(masks, later, strict=True)], np.uint64).view(
        np.int64
    )


def path_of(mask: int, row: int) -> list[int]:
    return [j for j in range(row) if mask >> j & 1] + [row]


def as_chain(args: dict[str, Any], r: int, path: list[int]) -> dict[str, Any]:
    """A call of request r alone whose new tokens are those of a path."""
    starts, cache = args["query_start_loc"], args["cache"]
    before = int(args["seq_lens"][r] - (starts[r + 1] - starts[r]))
    alone = select(args, [r])
    k = reference.unpack_k(cache.k).copy()
    v = None if cache.v is None else reference.unpack_v(cache.v).copy()
    scales = [None if scale is None else scale.transpose(0, 2, 1).copy() for scale in (cache.k_scale, cache.v_scale)]
    table = own_blocks(args, r)
    for array in (k, v, *scales):
        if array is None:
            continue
        source = array.copy()
        for to, token in enumerate(path):
            (block, offset), (other_block, other) = (
                divmod(before + to, cache.block_size),
                divmod(before + token, cache.block_size),
            )
            array[table[block], offset] = source[table[other_block], other]
    k_scale, v_scale = [None if scale is None else np.ascontiguousarray(scale.transpose(0, 2, 1)) for scale in scales]
    return {
        **alone,
        "q": args["q"][starts[r] + np.array(path)],
        "cache": KvCache(
            reference.pack_k(k), None if v is None else reference.pack_v(v), cache.first_key, k_scale, v_scale
        ),
        "query_start_loc": np.array([0, len(path)], np.int32),
        "seq_lens": np.array([before + len(path)], np.int32),
    }
