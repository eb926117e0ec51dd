"""Cases of cascade_append_attention and find_shared_prefixes, and ragged batches for tests of row invariance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.kv_cache import KvCache, RequestBlocks
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.cases.case import OpCases

# (tokens in the cache before, new tokens) of each request.
DECODE = [(0, 1), (14, 1), (15, 1), (16, 1), (62, 1), (63, 1), (64, 1), (510, 1), (511, 1), (512, 1), (1499, 1)]
VERIFY = [(10, 5), (60, 8), (508, 5), (1100, 3), (0, 2)]
PREFILL = [(0, 17), (0, 70), (50, 100), (500, 20)]
MIXED = [(0, 0), (700, 1), (0, 33), (90, 0), (511, 6), (64, 64), (3, 1)]
DTYPES: list[Any] = [np.float32, np.uint16]
FIRST_KEYS = [1, 2, 17, 63]
# A window and a softcap for some of them.
WINDOWS = {1: (1, None), 17: (17, 3.0), 63: (300, 20.0)}
Geometry = tuple[int, int, int, int]  # query heads, KV heads, head size, block size
SHAPES: list[tuple[Sequence[tuple[int, int]], Geometry]] = [
    ([], (2, 1, 16, 16)),
    (DECODE, (1, 1, 16, 16)),
    (DECODE, (4, 2, 128, 64)),
    (VERIFY, (4, 1, 64, 16)),
    (VERIFY, (8, 1, 32, 48)),
    (PREFILL, (2, 2, 80, 64)),
    (PREFILL, (16, 1, 48, 16)),
    (MIXED, (3, 1, 112, 32)),
    (MIXED, (2, 1, 256, 64)),
    (MIXED, (7, 1, 96, 16)),
]


def batch(
    requests: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: Any
) -> dict[str, Any]:
    """Build one call's arguments; blocks are scattered, and every slot that holds no token of a request is NaN."""
    rng = np.random.default_rng(len(requests) * heads + head_dim)
    lengths = np.array([computed + new for computed, new in requests], np.int32)
    num_blocks = [-(-int(length) // block_size) for length in lengths]
    ids = rng.permutation(sum(num_blocks) + 3)
    table_rows = np.arange(len(requests), dtype=np.int32)[::-1].copy()
    tables = np.full((len(requests), max(num_blocks, default=0) + 1), -1, np.int32)
    keys, values = np.full((2, len(ids), block_size, kv_heads, head_dim), np.nan, np.float32)
    for r, length in enumerate(lengths):
        own = tables[table_rows[r]]
        own[: num_blocks[r]], ids = ids[: num_blocks[r]], ids[num_blocks[r] :]
        positions = np.arange(length)
        slots = own[positions // block_size], positions % block_size
        drawn = rng.standard_normal((length, 2, kv_heads, head_dim), np.float32)
        keys[slots], values[slots] = drawn[:, 0], drawn[:, 1]
    new = np.array([new for _, new in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    # Every third row has sharp weights: one key takes nearly all.
    q = rng.standard_normal((starts[-1], heads * head_dim), np.float32)
    q[::3] *= 8.0
    return {
        "q": narrow(q, dtype),
        "cache": KvCache(reference.pack_k(narrow(keys, dtype)), reference.pack_v(narrow(values, dtype))),
        "query_start_loc": starts,
        "seq_lens": lengths,
        "blocks": RequestBlocks(table_rows, tables),
        "scale": head_dim**-0.5,
    }


def share(args: dict[str, Any], members: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """The same call with the blocks of the first member's first tokens, as far as they fill blocks, at all members."""
    rows, tables = args["blocks"].table_rows, args["blocks"].block_tables.copy()
    num_blocks = num_tokens // args["cache"].block_size
    tables[rows[members], :num_blocks] = tables[rows[members[0]], :num_blocks]
    return {**args, "blocks": RequestBlocks(rows, tables)}


def with_prefixes(args: Mapping[str, Any]) -> dict[str, Any]:
    """The same call with what its requests share."""
    return {**args, "prefixes": reference.find_shared_prefixes(**sharing(args))}


def sharing(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of find_shared_prefixes for the call."""
    cache = args["cache"]
    group_size = args["q"].shape[1] // cache.head_dim // cache.num_kv_heads
    own = {name: args[name] for name in ("query_start_loc", "seq_lens", "blocks")}
    return {**own, "block_size": cache.block_size, "group_size": group_size}


def own_blocks(args: dict[str, Any], r: int) -> np.ndarray:
    """The row of the block tables that belongs to request r."""
    row: np.ndarray = args["blocks"].block_tables[args["blocks"].table_rows[r]]
    return row


def shared_batches(dtype: Any) -> dict[str, dict[str, Any]]:
    """Calls whose requests begin with the same blocks: some of them, in two groups, nested, and up to their last token.

    Shared lengths end within partitions; rows of a group fill several tiles; one request has more rows than a tile.
    """
    some = batch([(1100, 1), (700, 1), (1100, 5), (40, 2), (1300, 3), (1024, 1)], 4, 2, 32, 16, dtype)
    nested = batch([(1100, 2), (1600, 1), (1100, 1), (0, 0), (1600, 3), (560, 1)], 2, 1, 48, 48, dtype)
    whole = batch([(511, 1), (511, 1), (1023, 1), (1020, 4)], 1, 1, 16, 16, dtype)
    many = batch([(540, 3)] * 8 + [(530, 40)] * 2, 4, 1, 16, 16, dtype)
    found = {
        "some": share(some, [0, 2, 4, 5], 1050),
        "two-groups": share(share(some, [2, 0, 5], 1100), [4, 1], 560),
        "nested": share(share(share(nested, [0, 1, 2, 4, 5], 560), [1, 4], 1590), [2, 0], 1090),
        "whole": share(share(whole, [0, 1], 512), [2, 3], 1024),
        "many": share(many, range(10), 530),
    }
    return {name: with_prefixes(args) for name, args in found.items()}


def sharing_inputs() -> dict[str, dict[str, Any]]:
    """What the calls above share, calls without a request or with one, and random tables of a few blocks."""
    found = {name: sharing(args) for name, args in shared_batches(np.float32).items()}
    found |= {f"plain-{i}": sharing(batch(SHAPES[i][0], *SHAPES[i][1], np.float32)) for i in (0, 1, 7)}
    rng = np.random.default_rng(9)
    for block_size, num_requests in ((16, 1), (64, 60), (512, 70), (16, 33), (96, 5)):
        depth = -(-2900 // block_size)
        # Few branches, at places that are more than a warp's loads into the table.
        tables = rng.integers(0, 2, (num_requests + 2, 1)) * np.ones(depth, np.int32)
        turns = rng.integers(0, depth * 2, num_requests + 2)
        tables += np.where(np.arange(depth) >= turns[:, None], 1 + rng.integers(0, 3, (num_requests + 2, 1)), 0)
        new = rng.choice([0, 1, 1, 1, 4, 9], num_requests)
        lengths = new + rng.integers(0, 2800, num_requests)
        found[f"random-{num_requests}-block{block_size}"] = {
            "query_start_loc": np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            "seq_lens": lengths.astype(np.int32),
            "blocks": RequestBlocks(
                rng.permutation(num_requests + 2)[:num_requests].astype(np.int32), tables.astype(np.int32)
            ),
            "block_size": block_size,
            "group_size": 8,
        }
    return found


def inputs() -> dict[str, dict[str, Any]]:
    """Lengths around panels (16), softmax steps (64), partitions (512) and blocks; groups of 1 to 16; no request."""
    found = {}
    for i, (requests, geometry) in enumerate(SHAPES):
        for dtype in DTYPES:
            name = f"{i}-{np.dtype(dtype)}-{geometry[0]}:{geometry[1]}x{geometry[2]}-block{geometry[3]}"
            found[name] = batch(requests, *geometry, dtype)
    for dtype, first_key, (requests, geometry) in itertools.product(DTYPES, FIRST_KEYS, SHAPES[1:]):
        shape = f"{geometry[0]}:{geometry[1]}x{geometry[2]}-block{geometry[3]}"
        args = batch(requests, *geometry, dtype)
        name = f"first-key-{first_key}-{np.dtype(dtype)}-{len(requests)}-{shape}"
        found[name] = without_first_keys(args, first_key)
        if first_key == FIRST_KEYS[-1]:
            found[name.replace("first-key", "sinks")] = with_sinks(args)
        if first_key in WINDOWS:
            found[name.replace("first-key", "window")] = windowed(args, first_key)
    for dtype in DTYPES:
        shared = shared_batches(dtype)
        found |= {f"shared-{name}-{np.dtype(dtype)}": args for name, args in shared.items()}
        found |= {f"shared-sinks-{name}-{np.dtype(dtype)}": with_sinks(args) for name, args in shared.items()}
    return found


def with_sinks(args: dict[str, Any]) -> dict[str, Any]:
    """The same call with sinks, from ones that count for nothing to one that takes nearly all."""
    num_heads = args["q"].shape[1] // args["cache"].head_dim
    return {**args, "sinks": np.linspace(-40, 12, num_heads, dtype=np.float32)}


def windowed(args: dict[str, Any], first_key: int) -> dict[str, Any]:
    """The same call with a window and a softcap, over a table without the blocks before the windows."""
    window, softcap = WINDOWS[first_key]
    kept = args if window is None else without_keys_before(args, window)
    return {**kept, "window": window, "softcap": softcap}


def without_first_keys(args: dict[str, Any], first_key: int) -> dict[str, Any]:
    """The same call with keys before first_key hidden; those that no row of their own position reads become NaN."""
    cache, starts, lengths = args["cache"], args["query_start_loc"], args["seq_lens"]
    k, v, s = cache.k.copy(), cache.v.copy(), cache.v.shape[4]
    (nan,) = narrow(np.array([np.nan], np.float32), k.dtype)
    for r, num_rows in enumerate(np.diff(starts)):
        for position in range(min(first_key, int(lengths[r] - num_rows))):
            block, offset = divmod(position, cache.block_size)
            k[own_blocks(args, r)[block], :, :, offset] = nan
            v[own_blocks(args, r)[block], :, offset // s, :, offset % s] = nan
    return {**args, "cache": KvCache(k, v, first_key)}


def without_keys_before(args: dict[str, Any], window: int) -> dict[str, Any]:
    """The same call without the blocks before the window of each request's first row; keys before it become NaN."""
    tables, size = args["blocks"].block_tables.copy(), args["cache"].block_size
    found = args["cache"]
    cache = replace(found, k=found.k.copy(), v=found.v.copy())
    for r, num_rows in enumerate(np.diff(args["query_start_loc"])):
        first = max(int(args["seq_lens"][r]) - int(num_rows) + 1 - window, 0)
        own = own_blocks(args, r)
        for position in range(first // size * size, first):
            if cache.k_scale is None:
                poison = np.nan if cache.k.dtype == np.float32 else 0x7FC0
                cache.k[own[position // size], :, :, position % size] = poison
                s = cache.v.shape[4]
                cache.v[own[position // size], :, position % size // s, :, position % s] = poison
        tables[args["blocks"].table_rows[r], : first // size] = -1
    return {**args, "cache": cache, "blocks": args["blocks"]._replace(block_tables=tables)}


def select(together: Mapping[str, Any], requests: Sequence[int]) -> dict[str, Any]:
    """Arguments for running some of a batch's requests, in this order."""
    starts = together["query_start_loc"]
    rows = [np.arange(starts[r], starts[r + 1]) for r in requests]
    some = {
        **together,
        "q": together["q"][np.concatenate([np.zeros(0, np.int64), *rows])],
        "query_start_loc": np.cumsum([0, *map(len, rows)]).astype(np.int32),
        "seq_lens": together["seq_lens"][list(requests)],
        "blocks": together["blocks"]._replace(table_rows=together["blocks"].table_rows[list(requests)]),
    }
    return with_prefixes(some) if "prefixes" in some else some


FIND_SHARED_PREFIXES = OpCases(
    "find_shared_prefixes",
    ops.find_shared_prefixes,
    reference.find_shared_prefixes,
    sharing_inputs(),
    ops.FIND_SHARED_PREFIXES,
)
# A score is a sum of D products in float32: error about sqrt(D) * 2^-24 * |q||k|, below 4e-5 for |score| up to 50, and
# the weights carry it on as a relative error; an output near 0 is a difference of values of size 1. bfloat16 adds the
# rounding of the result and of the weights: each is off by up to 2^-8 of itself, which counts where values differ from
# their mean, here by up to 4. Errors that this hides in long contexts are found in test_attention_accuracy.py.
CASCADE_APPEND_ATTENTION = OpCases(
    "cascade_append_attention",
    ops.cascade_append_attention,
    reference.cascade_append_attention,
    inputs(),
    ops.CASCADE_APPEND_ATTENTION,
    take=select,
    rtol=2e-5,
    atol=2e-5,
    bf16_atol=2.0**-7,
)
