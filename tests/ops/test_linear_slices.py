"""A sum in slices: the same bytes however many ranks hold them, the same cuts in Python and in the kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call
from fastdeploy_sd.ops import linear as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import pack_linear, packed_bytes
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types.ranges import COUNTS, WHOLE, SliceRule, halved
from tests.ops.backends import isa, threads

# (K, unit): tiny, fewer units than slices, groups that begin anew, one unit per slice, the groups of an uncut sum.
SUMS = [(0, 1), (1, 1), (3, 1), (5, 2), (129, 1), (300, 7), (514, 130), (640, 128), (2048, 512), (3072, 128)]
ROWS = (1, 5, 13)


def test_halves_are_cut_alike_in_python_and_in_the_kernels() -> None:
    border = library.library().fdsd_halving_border
    border.restype = ctypes.c_int64
    for size in [*range(40), 1 << 20, 151936, (1 << 31) - 1]:
        for count in COUNTS:
            for unit in (1, 2, 7, 64, 128):
                numbers = (ctypes.c_int64(size), count, ctypes.c_int64(unit))
                places = [border(*numbers, index) for index in range(count + 1)]
                assert halved(size, count, unit) == tuple(map(range, places[:-1], places[1:])), (size, count, unit)


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_ranks_that_add_in_the_tree_give_the_bytes_of_one(fmt: LinearFormat, level: str) -> None:
    rng = np.random.default_rng(1)
    for in_features, unit in SUMS:
        weight = rng.standard_normal((70, in_features), np.float32)
        bias = rng.standard_normal(70).astype(np.float32)
        for rows in ROWS:
            x: np.ndarray = rng.standard_normal((rows, in_features), np.float32)
            for count in (2, 4):
                rule = SliceRule(count, unit)
                whole = pack_linear(weight, fmt, rule)
                want, rounded = ops.linear(x, whole, bias), ops.linear(x, whole, bias, np.uint16)
                for num_ranks in (2, 4)[: count // 2]:
                    partials = []
                    for rank, part in enumerate(halved(in_features, num_ranks, unit)):
                        columns = slice(part.start, part.stop)
                        packed = pack_linear(weight[:, columns], fmt, rule.of_rank(num_ranks))
                        with threads(1 + rank):
                            partials.append(ops.linear(x[:, columns].copy(), packed))
                    while len(partials) > 1:
                        partials = [a + b for a, b in zip(partials[::2], partials[1::2], strict=True)]
                    where = f"{level} K={in_features} unit={unit} {num_ranks} ranks of {count} slices, {rows} rows"
                    np.testing.assert_array_equal(partials[0] + bias, want, err_msg=where)
                    np.testing.assert_array_equal(to_bf16(want), rounded, err_msg=where)


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_slices_at_multiples_of_a_group_are_packed_as_without(fmt: LinearFormat) -> None:
    weight = np.random.default_rng(2).standard_normal((40, 900), np.float32)
    whole = pack_linear(weight, fmt)
    for rule in (SliceRule(2, 128), SliceRule(4, 256)):
        np.testing.assert_array_equal(pack_linear(weight, fmt, rule).data, whole.data)
    assert packed_bytes(900, 40, "wint8", SliceRule(4, 1)) == packed_bytes(225, 40, "wint8") * 4


def test_slices_change_the_order_of_the_sum(level: str) -> None:
    """Else nothing here would be shown: 1e8 swallows what is added to it one by one."""
    weight: np.ndarray = np.ones((1, 8), np.float32)
    x: np.ndarray = np.array([[1e8, 1, 1, 1, 1, 1, 1, 1]], np.float32)
    got = [ops.linear(x, pack_linear(weight, "float32", rule))[0, 0] for rule in (WHOLE, SliceRule(2), SliceRule(4))]
    slices = [np.float32(1e8), np.float32(2), np.float32(2), np.float32(2)]
    want = [np.float32(1e8), np.float32(1e8) + np.float32(4), (slices[0] + slices[1]) + (slices[2] + slices[3])]
    assert got == want, level


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_ranges_of_a_matrix_are_packed_where_they_lie(fmt: LinearFormat) -> None:
    weight = np.random.default_rng(3).standard_normal((101, 517), np.float32)
    rows, columns = slice(7, 80), slice(130, 391)
    rule = SliceRule(4, 3)
    for data in (weight, to_bf16(weight), weight.astype(np.float16)):
        want = pack_linear(np.ascontiguousarray(data[rows, columns]), fmt, rule).data
        across = np.ascontiguousarray(data.T)
        matrix = WeightMatrix(
            (
                FloatPart("upper", data[7:40, columns]),
                FloatPart("middle", across[columns, 40:50], is_transposed=True),
                FloatPart("none", data[50:50, columns]),
                FloatPart("lower", data[50:80, columns]),
            )
        )
        for name in library.available_isas():
            with isa(name), threads(3):
                np.testing.assert_array_equal(pack_linear(matrix, fmt, rule).data, want, err_msg=name)


def test_what_is_no_rule_and_rows_with_gaps_are_named() -> None:
    weight: np.ndarray = np.zeros((4, 8), np.float32)
    numbers: dict[str, Any] = {"in_features": 8, "out_features": 4, "format": 0, "num_slices": 1, "slice_unit": 1}
    for name, expected in (("num_slices", "1, 2 or 4"), ("slice_unit", "1 or more")):
        with pytest.raises(ValueError, match=f"pack_linear: {name}: expected {expected}, got another number"):
            call("pack_linear", struct_type("PackLinearParams")(**numbers | {name: 0}))
    for rows in (weight[:, ::2], weight[::-1], weight.T):
        with pytest.raises(ValueError, match="weight: expected contiguous rows of float32, got strides"):
            pack_linear(rows, "float32")
