"""Products with integers that have a scale per group: exact dot products, rows that depend on themselves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.storages.gguf import BlockPart
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.group_packing import group_format, pack_groups
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import PackedLinear, packed_bytes
from fastdeploy_sd.ops.reference.linear import read_input
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import F32
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.models.gguf_files import random_blocks

pytestmark = pytest.mark.slow

NUM_COLUMNS = 768


def matrix(*parts: tuple[str, int], num_columns: int = NUM_COLUMNS) -> WeightMatrix:
    """Return parts of some block types and numbers of rows."""
    rng = np.random.default_rng(5)
    return WeightMatrix(
        tuple(
            BlockPart(f"p{i}", random_blocks(rng, name, rows, num_columns), BLOCK_TYPES[name], 0, num_columns)
            for i, (name, rows) in enumerate(parts)
        )
    )


def packed(weight: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> PackedLinear[Any]:
    num_rows, num_columns = weight.shape
    data = WeightMemory().take(packed_bytes(num_columns, num_rows, fmt, slices))
    pack_groups(weight, fmt, slices, data)
    return PackedLinear(data, num_columns, num_rows, fmt, slices)


def check(weight: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> None:
    x = np.random.default_rng(6).standard_normal((13, weight.shape[1])).astype(np.float32)
    own = packed(weight, fmt, slices)
    y: F32 = linear(x, own)
    want = read_input(x, "wint8", slices).astype(np.float64) @ weight.to_array().astype(np.float64).T
    np.testing.assert_allclose(y, want, atol=3e-6 * np.abs(want).max())
    for begin, end in ((0, 1), (3, 8), (11, 13)):
        some: F32 = linear(x[begin:end].copy(), own)
        np.testing.assert_array_equal(some, y[begin:end])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_product_is_that_of_the_numbers_in_the_file(name: str, level: str) -> None:
    """70 rows end within a panel."""
    del level
    weight = matrix((name, 70))
    assert group_format(weight, WHOLE) == BLOCK_TYPES[name].fmt
    check(weight, BLOCK_TYPES[name].fmt)


@pytest.mark.parametrize(
    ("parts", "fmt"),
    [
        ((("Q5_0", 40), ("Q5_0", 8), ("Q8_0", 8)), "q8_0"),
        ((("Q4_K", 40), ("Q4_K", 8), ("Q6_K", 8)), "int8_g16"),
        ((("Q4_1", 33), ("Q2_K", 31)), "int8_g16"),
        ((("MXFP4", 33), ("IQ4_XS", 31)), "int8_g16"),
    ],
)
def test_parts_of_several_types_share_a_format(
    parts: tuple[tuple[str, int], ...], fmt: LinearFormat, level: str
) -> None:
    del level
    weight = matrix(*parts)
    assert group_format(weight, WHOLE) == fmt
    check(weight, fmt)


def test_slices_begin_with_groups(level: str) -> None:
    """Slices of 192 begin in the middle of a block of 256, which the unit then shares with its neighbour."""
    del level
    slices = SliceRule(4, 192)
    for name, fmt in (("Q5_0", "q5_0"), ("Q4_K", "int8_g16")):
        weight = matrix((name, 40))
        assert group_format(weight, slices) == fmt
        check(weight, group_format(weight, slices) or "q8_0", slices)


def test_ranks_have_the_bytes_of_the_whole() -> None:
    slices = SliceRule(2, 128)
    for name in ("Q4_K", "Q8_0"):
        weight = matrix((name, 64))
        fmt = BLOCK_TYPES[name].fmt
        whole = packed(weight, fmt, slices).data.reshape(2, -1)
        left, right = (packed(weight.columns(part), fmt).data.reshape(2, -1) for part in slices.ranges(NUM_COLUMNS))
        np.testing.assert_array_equal(np.concatenate([left, right], axis=1), whole)
        upper = packed(weight.rows([range(32, 64)]), fmt, slices).data
        np.testing.assert_array_equal(upper, whole[1])
