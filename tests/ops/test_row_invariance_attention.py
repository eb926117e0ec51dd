"""A row of cascade_append_attention has the same bits in a chunk of any size, with any request that shares its blocks.

And it touches no key it does not see. That requests do not depend on one another is tested in test_ops.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.kv_cache import KvCache
from tests.ops.backends import LEVELS, isa, threads
from tests.ops.cases.attention import Geometry, batch, own_blocks, select, shared_batches
from tests.ops.chunks import chunk, run_chunks

pytestmark = pytest.mark.slow

LENGTH = 1100
# query heads, KV heads, head size, block size: groups of 1, 2, 5 and 16; two sizes at most on the slow scalar level.
GEOMETRIES = [(2, 1, 32, 16), (5, 1, 48, 64), (3, 3, 16, 48), (16, 1, 16, 32)]
EDGES = [0, 1, 14, 15, 16, 17, 62, 63, 64, 65, 254, 255, 256, 257, 511, 512, 575, 576, 1023, 1024, 1025, 1098, 1099]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("level", LEVELS)
def test_attention_rows_do_not_depend_on_chunks_or_threads(level: str, dtype: Any, geometry: Geometry) -> None:
    sequence = batch([(0, LENGTH)], *geometry, dtype)
    rng = np.random.default_rng(1)
    with isa(level):
        with threads(2):
            whole = run_chunks(sequence, [0, LENGTH])
        for count in (1, 2, 3):
            with threads(count):
                cuts = np.sort(rng.choice(np.arange(1, LENGTH), 12, replace=False))
                np.testing.assert_array_equal(run_chunks(sequence, [0, *cuts.tolist(), LENGTH]), whole)
                for row in EDGES:
                    alone = ops.cascade_append_attention(**chunk(sequence, row, row + 1))
                    np.testing.assert_array_equal(alone[0], whole[row], err_msg=f"row {row}, {count} threads")


@pytest.mark.parametrize("first_key", [1, 2, 16, 63])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("level", LEVELS)
def test_attention_rows_behind_hidden_keys_do_not_depend_on_chunks(level: str, dtype: Any, first_key: int) -> None:
    """Around first_key a tile holds rows that see one key, and rows that see others but not that one."""
    sequence = batch([(0, 140)], 5, 1, 48, 16, dtype)
    sequence["cache"] = replace(sequence["cache"], first_key=first_key)
    rng = np.random.default_rng(first_key)
    with isa(level), threads(2):
        alone = run_chunks(sequence, range(141))
        for count in (0, 1, 9, 40):
            cuts = np.sort(rng.choice(np.arange(1, 140), count, replace=False))
            np.testing.assert_array_equal(run_chunks(sequence, [0, *cuts.tolist(), 140]), alone)


@pytest.mark.parametrize("first_key", [0, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("level", LEVELS)
def test_attention_rows_do_not_depend_on_who_shares_their_blocks(level: str, dtype: Any, first_key: int) -> None:
    """Alone, all together, and in random parts of the batch, of which some share less or nothing."""
    rng = np.random.default_rng(first_key)
    for name, together in shared_batches(dtype).items():
        together["cache"] = replace(together["cache"], first_key=first_key)
        num_requests = len(together["seq_lens"])
        with isa(level), threads(1):
            alone = [ops.cascade_append_attention(**select(together, [r])) for r in range(num_requests)]
        for count in (1, 2, 3, 8):
            for size in (num_requests, num_requests - 1, 3, 2):
                some = rng.permutation(num_requests)[:size].tolist()
                with isa(level), threads(count):
                    y = ops.cascade_append_attention(**select(together, some))
                np.testing.assert_array_equal(y, np.concatenate([alone[r] for r in some]), err_msg=f"{name} {some}")


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("level", LEVELS)
def test_attention_rows_never_touch_later_keys(level: str, dtype: Any) -> None:
    block_size, stop, first_bad = 16, 600, 580
    sequence = batch([(0, stop)], 4, 2, 32, block_size, dtype)
    verify = chunk(sequence, 570, stop)
    poison = np.array(np.nan, np.float32) if dtype == np.float32 else np.uint16(0x7FC0)
    k, v = sequence["cache"].k.copy(), sequence["cache"].v.copy()
    for position in range(first_bad, stop):
        block, offset = own_blocks(sequence, 0)[position // block_size], position % block_size
        k[block, :, :, offset] = poison
        s = v.shape[4]
        v[block, :, offset // s, :, offset % s] = poison
    with isa(level):
        good = ops.cascade_append_attention(**verify)
        y = ops.cascade_append_attention(**{**verify, "cache": KvCache(k, v)})
    np.testing.assert_array_equal(y[: first_bad - 570], good[: first_bad - 570])
    is_nan = np.isnan(y) if dtype == np.float32 else (y & 0x7FFF) > 0x7F80
    assert is_nan[first_bad - 570 :].all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_sign_of_a_zero_does_not_depend_on_later_keys(level: str) -> None:
    """A sum that is flushed to -0 would become +0 where keys of weight 0 come behind it, as other rows' keys do."""
    sequence = batch([(0, 130)], 2, 1, 16, 64, np.uint16)
    sequence["q"][:] = 0
    v = sequence["cache"].v
    v[:] = 0
    first = own_blocks(sequence, 0)[0]
    v[first, 0, 0, :, 0] = 0x80C0  # -1.5 * 2^-126
    v[first, 0, 16, :, 0] = 0x0080  # 2^-126
    with isa(level):
        alone = run_chunks(sequence, range(131))
        # Row 63 is the last to see no further product's keys; other rows of the second chunk do.
        np.testing.assert_array_equal(run_chunks(sequence, [0, 50, 130]), alone)
