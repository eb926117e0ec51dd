"""How far attention over a bfloat16 cache is from attention in float64, row by row.

Rounding softmax weights to bfloat16 leaves about 2^-9 of a row: measured, the worst row of these cases is off by 0.4 %,
half of which is the rounding of the result. A key too many or too few is more than that in every case.
"""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import from_bf16, narrow
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.backends import LEVELS, isa
from tests.ops.cases.attention import batch


@pytest.mark.parametrize("num_computed", [3, 60, 512, 1900])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_within_half_a_percent_of_float64(level: str, num_computed: int) -> None:
    args = batch([(num_computed, 7)], 4, 2, 64, 16, np.uint16)
    exact = dict(args)
    exact["q"] = from_bf16(args["q"])
    cache = args["cache"]
    exact["cache"] = reference_cache(cache)
    want: np.ndarray = reference.cascade_append_attention(**exact)
    with isa(level):
        got = from_bf16(ops.cascade_append_attention(**args))
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.005, error


@pytest.mark.parametrize("level", LEVELS)
def test_weights_still_sum_to_one(level: str) -> None:
    """A column of V that is the same for every key comes out exactly, however the weights were rounded."""
    args = batch([(700, 3), (15, 2)], 4, 2, 32, 16, np.uint16)
    column = narrow(np.linspace(-2.0, 2.0, 32, dtype=np.float32), np.uint16)
    values = np.broadcast_to(column, (args["cache"].num_blocks, 16, 2, 32))
    args["cache"] = KvCache(args["cache"].k, reference.pack_v(values))
    with isa(level):
        y = ops.cascade_append_attention(**args)
    np.testing.assert_array_equal(y.reshape(-1, 32), np.broadcast_to(column, (y.size // 32, 32)))


def reference_cache(cache: KvCache[np.ndarray]) -> KvCache[np.ndarray]:
    """The same keys and values in float32 layout."""
    assert cache.v is not None
    keys: np.ndarray = reference.unpack_k(cache.k)
    values: np.ndarray = reference.unpack_v(cache.v)
    return KvCache(reference.pack_k(from_bf16(keys)), reference.pack_v(from_bf16(values)))
