"""Products with integers that have a scale per group: exact dot products, rows that depend on themselves alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest

from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.storages.gguf import BlockPart
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.bf16 import narrow, storage, widen
from fastdeploy_sd.ops.group_format import GroupFormat
from fastdeploy_sd.ops.group_packing import group_format, pack_groups, stored_matrix
from fastdeploy_sd.ops.linear import gather_weight_rows, linear
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import PackedLinear, packed_bytes
from fastdeploy_sd.ops.reference.linear import read_input
from fastdeploy_sd.ops.weight_matrix import Factors, FloatPart, Integers, WeightMatrix, WeightPart
from fastdeploy_sd.types import F32
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.models.gguf_files import random_blocks
from tests.ops.cuda_device import OpRunner

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
    stored = stored_matrix(weight, fmt, slices)
    assert stored is not None
    pack_groups(stored, data)
    return PackedLinear(data, num_columns, num_rows, fmt, slices)


def check_rows(weight: WeightMatrix, own: PackedLinear[Any]) -> None:
    indices = np.array([weight.shape[0] - 1, 0, 17, 33], np.int32)
    for dtype in ("float32", "bfloat16"):
        want = narrow(widen(weight.to_array()[indices]), storage(dtype))
        np.testing.assert_array_equal(widen(gather_weight_rows(own, indices, dtype)), widen(want))


def check(weight: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> None:
    x = np.random.default_rng(6).standard_normal((70, weight.shape[1])).astype(np.float32)
    own = packed(weight, fmt, slices)
    y: F32 = linear(x, own)
    want = read_input(x, "wint8", slices).astype(np.float64) @ weight.to_array().astype(np.float64).T
    np.testing.assert_allclose(y, want, atol=3e-6 * np.abs(want).max())
    for begin, end in ((0, 1), (3, 8), (11, 24)):
        some: F32 = linear(x[begin:end].copy(), own)
        np.testing.assert_array_equal(some, y[begin:end])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_product_is_that_of_the_numbers_in_the_file(name: str, level: str) -> None:
    """70 rows end within a panel."""
    del level
    weight = matrix((name, 70))
    assert group_format([weight], WHOLE) == BLOCK_TYPES[name].fmt
    check(weight, BLOCK_TYPES[name].fmt)
    check_rows(weight, packed(weight, BLOCK_TYPES[name].fmt))


@pytest.mark.parametrize(("name", "codes"), [("Q4_1", slice(4, 20)), ("Q5_1", slice(4, 24)), ("Q6_K", slice(0, 192))])
def test_the_largest_sums_are_exact(name: str, codes: slice, level: str) -> None:
    """All bits of codes are set, and inputs are the largest integers; some levels add them in 16 bits."""
    del level
    blocks = random_blocks(np.random.default_rng(7), name, 40, NUM_COLUMNS)
    blocks.reshape(-1, BLOCK_TYPES[name].num_bytes)[:, codes] = 255
    weight = WeightMatrix((BlockPart("w", blocks, BLOCK_TYPES[name], 0, NUM_COLUMNS),))
    y: F32 = linear(np.ones((2, NUM_COLUMNS), np.float32), packed(weight, BLOCK_TYPES[name].fmt))
    want = weight.to_array().sum(axis=1, dtype=np.float64)
    np.testing.assert_allclose(y[1], want, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    ("parts", "fmt"),
    [
        ((("Q5_0", 40), ("Q5_0", 8), ("Q8_0", 8)), "q8_0"),
        ((("Q4_K", 40), ("Q5_K", 8), ("Q6_K", 8)), "int6_g16"),
        ((("Q3_K", 40), ("Q2_K", 8)), "int6_g16"),
        ((("Q4_1", 33), ("Q2_K", 31)), "int8_g16"),
        ((("MXFP4", 33), ("IQ4_XS", 31)), "int8_g32"),
    ],
)
def test_parts_of_several_types_share_a_format(
    parts: tuple[tuple[str, int], ...], fmt: LinearFormat, level: str
) -> None:
    del level
    weight = matrix(*parts)
    assert group_format([weight], WHOLE) == fmt
    check(weight, fmt)


@dataclass(frozen=True, slots=True, eq=False)
class IntegerPart(WeightPart):
    """Random integers of 4 or 8 bits in groups, as repositories have them."""

    stored: Integers
    held: GroupFormat

    @classmethod
    def make(cls, bits: int, group: int, num_rows: int, *, has_zeros: bool) -> Self:
        rng, low, high = np.random.default_rng(bits + group), -(1 << bits - 1), 1 << bits - 1
        shape = num_rows, NUM_COLUMNS // group
        codes = rng.integers(low, high, (num_rows, NUM_COLUMNS), np.int8)
        scales = (rng.standard_normal(shape) / 100).astype(np.float32)
        zeros = Factors(scales, rng.integers(low, high, shape, np.int8)) if has_zeros else None
        held = GroupFormat(bits, group, "float", "zeros" if has_zeros else "none", high)
        return cls("p", codes, Integers(codes, Factors(scales), zeros), held)

    @property
    def group_format(self) -> GroupFormat:
        return self.held

    def integers(self, rows: slice) -> Integers:
        return self.stored

    def numbers(self) -> FloatPart:
        return FloatPart(self.name, self.stored.numbers())

    def _cut(self, rows: range, columns: range) -> Self:
        raise NotImplementedError


def grouped_matrices() -> dict[str, WeightMatrix]:
    """A matrix for every size of groups, with minima and without, of all bits."""
    names = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
    stored = {name: matrix((name, 70)) for name in names}
    for bits, group in ((4, 64), (4, 128), (8, 32)):
        part = IntegerPart.make(bits, group, 70, has_zeros=True)
        stored[f"{bits} bits, groups of {group}"] = WeightMatrix((part,))
    return stored


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros", "fmt"),
    [
        (4, 32, True, "int4_g32"), (4, 64, True, "int4_g64"), (4, 128, True, "int4_g128"), (4, 128, False, "int4_g128"),
        (4, NUM_COLUMNS, False, "int4_g128"), (4, 192, False, "int4_g64"), (8, 128, True, "int8_g32"),
        (8, NUM_COLUMNS, False, "wint8"), (8, 48, False, "int8_g16"),
    ],
)  # fmt: skip
def test_integers_of_repositories(bits: int, group: int, has_zeros: bool, fmt: LinearFormat, level: str) -> None:
    """A scale for a whole row is one for each of its groups."""
    del level
    part = IntegerPart.make(bits, group, 40, has_zeros=has_zeros)
    assert group_format([WeightMatrix((part,))], WHOLE) == fmt
    check(WeightMatrix((part,)), fmt)
    check_rows(WeightMatrix((part,)), packed(WeightMatrix((part,)), fmt))


def test_slices_begin_with_groups(level: str) -> None:
    """Slices of 192 begin in the middle of a block of 256, which the unit then shares with its neighbour."""
    del level
    slices = SliceRule(4, 192)
    cases: tuple[tuple[str, LinearFormat], ...] = (("Q5_0", "q5_0"), ("Q4_K", "int8_g16"))
    for name, fmt in cases:
        weight = matrix((name, 40))
        assert group_format([weight], slices) == fmt
        check(weight, fmt, slices)
        for part in slices.ranges(NUM_COLUMNS):
            assert group_format([weight.columns(part)], slices.of_rank(4)) == fmt


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


GPU_CASES: tuple[tuple[str, LinearFormat], ...] = (
    *((name, block.fmt) for name, block in BLOCK_TYPES.items() if name != "IQ4_NL"),
    ("Q4_1", "int8_g16"),
    ("Q6_K", "int6_g16"),
)


@pytest.mark.parametrize(("name", "fmt"), GPU_CASES)
def test_gpus_multiply_the_same_numbers(name: str, fmt: LinearFormat, device: OpRunner) -> None:
    """Whatever the number of rows, in slices too."""
    with device.runs_ops():
        check(matrix((name, 40)), fmt, SliceRule(2, 128))
        check_rows(matrix((name, 40)), packed(matrix((name, 40)), fmt))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32)])
def test_gpus_subtract_zero_points(bits: int, group: int, device: OpRunner) -> None:
    weight = WeightMatrix((IntegerPart.make(bits, group, 40, has_zeros=True),))
    fmt = group_format([weight], WHOLE)
    assert fmt == f"int{bits}_g{group}"
    with device.runs_ops():
        check(weight, fmt)
        check_rows(weight, packed(weight, fmt))
