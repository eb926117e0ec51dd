"""Chips copy in other ways, have other tiles for want of shared memory, and give the same bits by one instruction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fastdeploy_sd.models.weights.storages.float8 import Float8Part
from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.group_packing import group_format
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import GPU_FORMATS, LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.ops.cases.attention import batch, share, with_prefixes
from tests.ops.cases.latent import as_latents
from tests.ops.cases.trees import random_tree
from tests.ops.cuda_device import emulated
from tests.ops.test_cuda_attention import CACHES, dtype_of, over
from tests.ops.test_cuda_attention_sharing import widened
from tests.ops.test_grouped_linear import grouped_matrices, packed
from tests.ops.test_ops import OPS, bits

pytestmark = pytest.mark.slow

# Ampere with 163 and with 99 KB of shared memory for a block, which copies in pieces, and Blackwell with 99 KB, which
# copies rows as a whole.
CHIPS = (80, 86, 120)
WITH_HOPPER = (*CHIPS, 90)  # where all have the instruction, or any gives the same bits
REQUESTS = [(300, 1), (270, 3), (0, 2)]


def assert_same_bits(chips: Sequence[int], run: Callable[[], np.ndarray], text: str = "") -> None:
    found = []
    for chip in chips:
        with emulated().emulates(chip), emulated().runs_ops():
            found.append(bits(run()))
    for chip, got in zip(chips[1:], found[1:], strict=True):
        np.testing.assert_array_equal(got, found[0], err_msg=f"{text}: sm_{chip}, sm_{chips[0]}")


@pytest.mark.parametrize("fmt", [*LINEAR_FORMATS, *GPU_FORMATS])
def test_products(fmt: LinearFormat) -> None:
    """In tiles of 8, 32, 64 and 128 rows, the last with sums of four slices in shared memory."""
    groups: list[tuple[int, ...]] = [CHIPS]
    if fmt == "fp8":  # e4m3 as bfloat16, and as it is
        groups = [(80, 86), (89, 100, 120)]
    elif fmt == "e4m3":
        groups = [(*CHIPS, 89, 100)]
    elif fmt in ("wint8", "wint4"):
        groups = [WITH_HOPPER]
    rng = np.random.default_rng(1)
    x: np.ndarray = rng.standard_normal((66, 600), np.float32)
    weights = rng.standard_normal((40, 600), np.float32)
    for count, rows in ((1, 3), (2, 20), (4, 50), (4, 66)):
        packed = pack_linear(weights, fmt, SliceRule(count, 130))
        for chips in groups:
            assert_same_bits(chips, functools.partial(linear, x[:rows], packed), f"{rows} rows")


def test_codes_of_e4m3_are_multiplied_as_the_numbers_they_are() -> None:
    """All codes, subnormal ones and both zeros too, with sums that are exact: the bits of a processor on all chips."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (70, 640)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80
    matrix = WeightMatrix((Float8Part("w", codes, np.full((1, 1), 0.5, np.float32), (), codes.shape),))
    x = (rng.integers(-3, 4, (130, 640)) * (rng.random((130, 640)) < 0.02)).astype(np.float32)
    for rule in (WHOLE, SliceRule(4, 128)):
        own = packed(matrix, "e4m3", rule)
        want: np.ndarray = linear(x, own)
        np.testing.assert_array_equal(want, x.astype(np.float64) @ matrix.to_array().astype(np.float64).T)
        for rows in (3, 20, 50, 130):
            for chip in (80, 86, 89, 90, 100, 120):
                with emulated().emulates(chip), emulated().runs_ops():
                    got: np.ndarray = linear(x[:rows], own)
                np.testing.assert_array_equal(bits(got), bits(want[:rows]), err_msg=f"{rows} rows on sm_{chip}")


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "MXFP4", "4 bits, groups of 128"])
def test_integers_in_groups(name: str) -> None:
    """Of all bits, sizes of groups and sorts of scales, in tiles of 8, 32 and 128 rows, with sums of four slices."""
    weight = grouped_matrices()[name]
    fmt = group_format([weight], WHOLE)
    assert fmt is not None
    own = packed(weight, fmt, SliceRule(4, 128))
    x: np.ndarray = np.random.default_rng(1).standard_normal((66, weight.shape[1]), np.float32)
    for rows in (3, 20, 66):
        assert_same_bits((80, 86, 89, 90, 100, 120), functools.partial(linear, x[:rows], own), f"{rows} rows")


@pytest.mark.parametrize(
    ("cache", "head_dim"), [*zip(CACHES, (128, 256, 256, 128, 64, 256), strict=True), ("bf16", 256)]
)
def test_attention(cache: str, head_dim: int) -> None:
    args = with_prefixes(over(cache, share(batch(REQUESTS, 2, 1, head_dim, 16, dtype_of(cache)), [0, 1], 256)))
    masks = np.concatenate([random_tree(np.random.default_rng(1), count) for _, count in REQUESTS])
    for way in (args, {**args, "prefixes": None}):
        assert_same_bits(CHIPS, functools.partial(ops.cascade_append_attention, **way, tree_mask=masks))


def test_attention_over_latent_vectors() -> None:
    """By blocks of a partition each, and by blocks that keep what their partitions have summed."""
    args = with_prefixes(share(as_latents(batch(REQUESTS[:2], 3, 1, 576, 16, np.uint16)), [0, 1], 256))
    for way in (args, widened(args, 1 << 17)):
        assert_same_bits(WITH_HOPPER, functools.partial(ops.cascade_append_attention, **way))


def test_experts() -> None:
    case = next(case for name, case in OPS["moe_ffn"].inputs.items() if name == "bfloat16-2-slices")
    assert_same_bits(CHIPS, functools.partial(OPS["moe_ffn"].function, **case))
