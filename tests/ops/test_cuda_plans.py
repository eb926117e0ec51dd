"""Tiles and stages follow from what a device gives a block and a multiprocessor, and from nothing else."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import pytest

from fastdeploy_sd.ops.group_format import GROUP_FORMATS
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from tests.ops.cuda_device import planted_kernels

pytestmark = pytest.mark.slow

KB = 1024
RESERVED = KB  # of shared memory, of each block
REGISTERS = 64 * KB


class Limits(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("block_bytes", "sm_bytes", "reserved_bytes", "sm_threads", "sm_blocks", "sm_registers")
    ]


class Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("num_stages", "shared_bytes", "num_blocks")]

    def __iter__(self) -> Iterator[int]:
        return iter((self.num_stages, self.num_blocks))


def limits(block_kb: int, sm_kb: int, threads: int, blocks: int) -> Limits:
    return Limits(block_kb * KB, sm_kb * KB, RESERVED, threads, blocks, REGISTERS)


CHIPS = {
    80: limits(163, 164, 2048, 32),
    86: limits(99, 100, 1536, 16),
    89: limits(99, 100, 1536, 24),
    90: limits(227, 228, 2048, 32),
    100: limits(227, 228, 2048, 32),
    120: limits(99, 100, 1536, 24),
}
SMALL = (86, 89, 120)


def linear(on: Limits, fmt: LinearFormat, rows: int, slices: int = 1, *, by_warpgroup: bool = False) -> Plan:
    function = ctypes.CDLL(str(planted_kernels())).linear_plan
    function.restype = Plan
    return function(on, by_warpgroup, format_code(fmt), rows, slices)


def attention(on: Limits, element_bytes: int, head_dim: int) -> Plan:
    function = ctypes.CDLL(str(planted_kernels())).attention_plan
    function.restype = Plan
    return function(on, element_bytes, head_dim)


def assert_fits(plan: Plan, on: Limits, threads: int) -> None:
    assert 0 < plan.shared_bytes <= on.block_bytes
    assert 1 <= plan.num_blocks <= on.sm_blocks
    assert plan.num_blocks * (plan.shared_bytes + RESERVED) <= on.sm_bytes
    assert plan.num_blocks * threads <= on.sm_threads


@pytest.mark.parametrize("chip", CHIPS)
def test_every_tile_has_room_on_every_chip(chip: int) -> None:
    on = CHIPS[chip]
    for fmt, rows, slices in itertools.product(("bfloat16", *GROUP_FORMATS), (8, 32, 64, 128), (1, 2, 4)):
        has_groups = fmt not in ("bfloat16", "wint8", "wint4")
        if has_groups and rows == 64:
            continue
        plan = linear(on, fmt, rows, slices, by_warpgroup=chip == 90)
        if chip in SMALL and rows == 64:
            assert tuple(plan) == (0, 0), "32 rows are taken in their place"
            continue
        assert 2 <= plan.num_stages <= 4
        assert_fits(plan, on, 256)
    for element_bytes, head_dim in itertools.product((1, 2, 4), (16, 64, 80, 128, 192, 256)):
        assert_fits(attention(on, element_bytes, head_dim), on, 128)
    for latent in (576, 640):
        plan = attention(on, 2, latent)
        assert plan.num_stages >= 2
        assert_fits(plan, on, 128)


def test_stages_are_as_many_as_leave_room_for_the_most_blocks() -> None:
    """(stages, blocks of a multiprocessor) of bfloat16: 8, 32, 64 and 128 rows; heads of 64, 128 and 256 elements."""

    def plans(on: Limits) -> list[tuple[int, ...]]:
        rows = [linear(on, "bfloat16", count) for count in (8, 32, 64, 128)]
        return [tuple(plan) for plan in (*rows, *(attention(on, 2, head_dim) for head_dim in (64, 128, 256)))]

    large = [(4, 2), (4, 1), (4, 1), (4, 1), (4, 2), (4, 2), (4, 2)]
    small = [(2, 2), (2, 1), (0, 0), (4, 1), (4, 2), (2, 2), (4, 1)]
    assert plans(CHIPS[100]) == plans(CHIPS[90]) == large
    assert plans(CHIPS[80]) == [(3, 2), (4, 1), (3, 1), (4, 1), (4, 2), (4, 2), (2, 2)]
    assert [plans(CHIPS[chip]) for chip in SMALL] == [small] * len(SMALL)


def test_slices_take_the_place_of_stages() -> None:
    """Sums of slices are in shared memory: of four of them twice those of one or two."""
    on = CHIPS[89]
    assert [linear(on, "wint8", 128, slices).num_stages for slices in (1, 2, 4)] == [4, 4, 2]
    assert [linear(CHIPS[80], "wint8", 128, slices).num_stages for slices in (1, 2, 4)] == [4, 4, 4]


def test_a_device_that_no_chip_is_has_a_plan_of_its_own() -> None:
    """By each of its limits: shared memory of a block and of a multiprocessor, threads, blocks."""
    assert tuple(linear(limits(60, 200, 2048, 32), "bfloat16", 8)) == (2, 2)
    assert tuple(linear(limits(120, 120, 2048, 32), "bfloat16", 8)) == (2, 2)
    assert tuple(linear(limits(227, 228, 256, 32), "bfloat16", 8)) == (4, 1)
    assert tuple(linear(limits(227, 228, 2048, 1), "bfloat16", 8)) == (4, 1)
    assert tuple(linear(limits(40, 228, 2048, 32), "bfloat16", 8)) == (0, 0)
    assert tuple(attention(limits(60, 60, 2048, 32), 2, 128)) == (2, 1)
