"""New tokens that are a tree of drafts, on CPUs: a row has the bits of the chain that leads to it.

With any request that shares its blocks, in a batch or alone, on any number of threads, whatever it does not see.
"""

from __future__ import annotations

import itertools
import pathlib
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.backends import LEVELS, isa, threads
from tests.ops.cases.attention import Geometry, batch, own_blocks, select, share, with_prefixes
from tests.ops.cases.attention_int8 import quantized
from tests.ops.cases.latent import as_latents
from tests.ops.cases.trees import as_chain, path_of, random_tree

CACHES = ["bf16", "float32", "int8"]
LATENTS: list[tuple[Geometry, int]] = [((4, 1, 48, 16), 0), ((128, 1, 80, 64), 2)]
GEOMETRIES: list[tuple[Geometry, int]] = [((4, 2, 32, 16), 0), ((5, 1, 48, 64), 5), ((16, 2, 16, 48), 63)]
# Tokens before and new ones: trees that begin at a partition, a panel or within one, that reach over a partition's end,
# of the largest size, without anything before, behind more partitions than are shared; one row; one row too many.
REQUESTS = [(300, 12), (250, 9), (512, 5), (0, 20), (63, 2), (780, 64), (30, 1), (0, 65), (512, 17), (1100, 3)]


def call(cache: str, geometry: Geometry, first_key: int) -> dict[str, Any]:
    args = batch(REQUESTS, *geometry, np.float32 if "float32" in cache else np.uint16)
    args["cache"] = replace(args["cache"], first_key=first_key)
    if cache == "int8":
        args = quantized(args, first_key)
    if cache.endswith("latents"):
        args = as_latents(args)
    return share(args, [2, 5, 8, 9], 512)


def trees(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([random_tree(rng, count) for _, count in REQUESTS])


CELLS = [
    *itertools.product(CACHES, GEOMETRIES),
    *itertools.product(["bf16 latents", "float32 latents"], LATENTS),
]


@pytest.mark.parametrize(("cache", "geometry", "first_key"), [(cache, *rest) for cache, rest in CELLS], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_a_tree_has_the_bits_of_its_path(level: str, cache: str, geometry: Geometry, first_key: int) -> None:
    """In float32, where nothing is rounded, it is also checked against the definition."""
    rng = np.random.default_rng(first_key)
    args = call(cache, geometry, first_key)
    masks, starts = trees(rng), args["query_start_loc"]
    with isa(level), threads(1):
        y = ops.cascade_append_attention(**args, tree_mask=masks)
        for r, (_, count) in enumerate(REQUESTS):
            if count > 64:
                np.testing.assert_array_equal(
                    y[starts[r] : starts[r + 1]], ops.cascade_append_attention(**select(args, [r]))
                )
                continue
            for row in {count - 1, *rng.integers(0, count, 2).tolist()}:
                path = path_of(int(masks[starts[r] + row]), row)
                chain = ops.cascade_append_attention(**as_chain(args, r, path))
                np.testing.assert_array_equal(y[starts[r] + row], chain[-1], err_msg=f"request {r}, row {row}")
    for count, way in ((1, with_prefixes(args)), (2, args), (16, with_prefixes(args))):
        with isa(level), threads(count):
            np.testing.assert_array_equal(ops.cascade_append_attention(**way, tree_mask=masks), y)
    if "float32" in cache:
        want = reference.cascade_append_attention(**args, tree_mask=masks)
        np.testing.assert_allclose(widen(y), widen(want), rtol=2e-5, atol=4e-5)


def test_trees_behind_a_shared_prefix_need_no_memory_for_each_partition() -> None:
    """Ten requests share one partition and have 19 more before 16 new rows: 31 MB of results of all of them."""
    args = batch([(5130, 16)] + [(240, 16)] * 9, 32, 8, 64, 256, np.uint16)
    first = own_blocks(args, 0).copy()
    for r in range(1, 10):
        own_blocks(args, r)[:] = [first[0], own_blocks(args, r)[0], *first[2:]]
    args["seq_lens"][:] = args["seq_lens"][0]
    masks = np.tile(random_tree(np.random.default_rng(1), 16), 10)
    growth: list[int] = []

    def run() -> None:  # by a thread that has no scratch memory yet
        before = resident_bytes()
        y = ops.cascade_append_attention(**with_prefixes(args), tree_mask=masks)
        growth.append(resident_bytes() - before)
        np.testing.assert_array_equal(y, ops.cascade_append_attention(**args, tree_mask=masks))

    with ThreadPoolExecutor(1) as executor:
        executor.submit(run).result()
    assert growth[0] < 10 << 20


def resident_bytes() -> int:
    """Memory of this process that it has touched."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_a_tree_touches_no_token_that_it_does_not_see(level: str, cache: str) -> None:
    """Of two chains side by side the second begins with NaN, which all of its rows see."""
    args = select(call(cache, (4, 2, 32, 16), 0), [8])
    rows = range(args["query_start_loc"][1])
    masks = np.array([sum(1 << j for j in range(row) if j % 2 == row % 2) for row in rows], np.int64)
    bad = np.array([np.nan], np.float32)
    k, v = args["cache"].k.copy(), args["cache"].v.copy()
    scales = [None if x is None else x.copy() for x in (args["cache"].k_scale, args["cache"].v_scale)]
    block, offset = divmod(512 + 1, 16)
    block = own_blocks(args, 0)[block]
    for scale in scales:
        if scale is not None:
            scale[block, :, offset] = bad
    if cache != "int8":
        s = v.shape[4]
        k[block, :, :, offset] = v[block, :, offset // s, :, offset % s] = narrow(bad, args["q"].dtype)
    poisoned = replace(args["cache"], k=k, v=v, k_scale=scales[0], v_scale=scales[1])
    with isa(level):
        good = ops.cascade_append_attention(**args, tree_mask=masks)
        y = ops.cascade_append_attention(**{**args, "cache": poisoned}, tree_mask=masks)
    np.testing.assert_array_equal(y[::2], good[::2])
    assert np.isnan(widen(y[1::2])).all()


@pytest.mark.parametrize("cache", CACHES)
def test_a_mask_that_hides_nothing_changes_nothing(cache: str) -> None:
    args = call(cache, (4, 2, 32, 16), 0)
    every = [(1 << np.minimum(np.arange(count), 62).astype(np.int64)) - 1 for _, count in REQUESTS if count < 64]
    args = select(args, [r for r, (_, count) in enumerate(REQUESTS) if count < 64])
    want, got = (ops.cascade_append_attention(**args, tree_mask=mask) for mask in (None, np.concatenate(every)))
    np.testing.assert_array_equal(got, want)
