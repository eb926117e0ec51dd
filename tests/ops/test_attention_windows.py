"""Rows of cascade_append_attention with sliding windows and softcaps have the same bits in any chunk and in any tree.

Against the reference they are tested in test_ops.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.backends import LEVELS, isa, threads
from tests.ops.cases.attention import CASCADE_APPEND_ATTENTION, Geometry, batch, without_keys_before
from tests.ops.cases.attention_int8 import CASCADE_APPEND_ATTENTION_INT8, blunt, quantized
from tests.ops.chunks import chunk, run_chunks
from tests.ops.test_ops import assert_same

pytestmark = pytest.mark.slow

LENGTH = 620
# query heads, KV heads, head size, block size
GEOMETRIES: list[Geometry] = [(4, 1, 256, 16), (5, 1, 48, 64), (2, 2, 32, 48)]
CACHES = ("float32", "bfloat16", "int8")


def sequence_of(cache: str, geometry: Geometry, requests: list[tuple[int, int]]) -> dict[str, Any]:
    if cache == "int8":
        return quantized(blunt(batch(requests, *geometry, np.float32)))
    return batch(requests, *geometry, np.float32 if cache == "float32" else np.uint16)


@pytest.mark.parametrize("window", [1, 6, 64, 250, 257, 300])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("level", LEVELS)
def test_rows_with_windows_do_not_depend_on_chunks_or_threads(level: str, cache: str, window: int) -> None:
    rng = np.random.default_rng(window)
    geometry = GEOMETRIES[window % len(GEOMETRIES)]
    sequence = sequence_of(cache, geometry, [(0, LENGTH)]) | {"window": window, "softcap": 4.0}
    with isa(level):
        with threads(1):
            whole = run_chunks(sequence, [0, LENGTH])
        for count in (1, 2):
            cuts = np.sort(rng.choice(np.arange(1, LENGTH), 8, replace=False)).tolist()
            borders = [0, *cuts, LENGTH]
            with threads(count):
                np.testing.assert_array_equal(run_chunks(sequence, borders), whole)
                for row in (0, window - 1, window, 255, 256, 300, 511, 512, *cuts):
                    args = without_keys_before(chunk(sequence, row, row + 1), window)
                    np.testing.assert_array_equal(ops.cascade_append_attention(**args)[0], whole[row], str(row))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_a_tree_has_the_window_of_its_path(level: str, cache: str) -> None:
    sequence = sequence_of(cache, (4, 2, 32, 16), [(0, 266)])
    tree = chunk(sequence, 261, 266)
    cases = CASCADE_APPEND_ATTENTION_INT8 if cache == "int8" else CASCADE_APPEND_ATTENTION
    mask = np.array([0, 0b1, 0b1, 0b11, 0b101], np.int64)
    for window in (1, 2, 7, 100, 262):
        args = without_keys_before(tree, window) | {"window": window, "tree_mask": mask}
        with isa(level), threads(2):
            y = ops.cascade_append_attention(**args)
            path = ops.cascade_append_attention(**without_keys_before(chunk(sequence, 261, 263), window), window=window)
        np.testing.assert_array_equal(y[:2], path, f"window {window}")
        assert_same([y], [reference.cascade_append_attention(**args)], cases, f"window {window}")


def test_a_window_with_shared_prefixes_and_numbers_outside_are_refused() -> None:
    args = batch([(5, 1)], 2, 1, 16, 16, np.float32)
    prefixes = ops.find_shared_prefixes(args["query_start_loc"], args["seq_lens"], args["blocks"], 16, 2)
    with pytest.raises(ValueError, match="prefixes: expected none with a window"):
        ops.cascade_append_attention(**args, prefixes=prefixes, window=3)
    with pytest.raises(ValueError, match="window: expected 0"):
        ops.cascade_append_attention(**args, window=-1)
    with pytest.raises(ValueError, match="softcap: expected 0"):
        ops.cascade_append_attention(**args, softcap=float("nan"))
