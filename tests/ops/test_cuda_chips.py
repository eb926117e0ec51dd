"""Chips with 99 KB of shared memory have tiles and stages of their own, and the bits of chips with more."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.linear_format import GPU_FORMATS, LINEAR_FORMATS, LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.types.ranges import SliceRule
from tests.ops.cases.attention import batch, share, with_prefixes
from tests.ops.cases.latent import as_latents
from tests.ops.cases.trees import random_tree
from tests.ops.cuda_device import emulated
from tests.ops.test_cuda_attention import CACHES, dtype_of, over
from tests.ops.test_cuda_attention_sharing import widened
from tests.ops.test_ops import OPS, bits

pytestmark = pytest.mark.slow

# Chip -> one that has the same instructions and more shared memory.
CHIPS = {86: 80, 89: 100, 120: 100}
REQUESTS = [(300, 1), (270, 3), (0, 2)]


def assert_same_bits(run: Callable[[], np.ndarray], text: str = "") -> None:
    """Of what the chips find."""
    found: dict[int, np.ndarray] = {}
    for chip in (*CHIPS, *CHIPS.values()):
        with emulated().emulates(chip), emulated().runs_ops():
            found[chip] = bits(run())
    for chip, other in CHIPS.items():
        np.testing.assert_array_equal(found[chip], found[other], err_msg=f"{text}: sm_{chip}, sm_{other}")


@pytest.mark.parametrize("fmt", [*LINEAR_FORMATS, *GPU_FORMATS])
def test_products(fmt: LinearFormat) -> None:
    """In tiles of 8, 32, 64 and 128 rows, the last with sums of one or four slices in shared memory."""
    rng = np.random.default_rng(1)
    x: np.ndarray = rng.standard_normal((66, 600), np.float32)
    weights = rng.standard_normal((40, 600), np.float32)
    for count, rows in ((1, 3), (1, 20), (4, 50), (4, 66)):
        packed = pack_linear(weights, fmt, SliceRule(count, 130))
        assert_same_bits(functools.partial(linear, x[:rows], packed), f"{rows} rows")


@pytest.mark.parametrize(
    ("cache", "head_dim"), [*zip(CACHES, (128, 256, 256, 128, 64, 256), strict=True), ("bf16", 256)]
)
def test_attention(cache: str, head_dim: int) -> None:
    args = with_prefixes(over(cache, share(batch(REQUESTS, 2, 1, head_dim, 16, dtype_of(cache)), [0, 1], 256)))
    masks = np.concatenate([random_tree(np.random.default_rng(1), count) for _, count in REQUESTS])
    assert_same_bits(functools.partial(ops.cascade_append_attention, **args, tree_mask=masks))


def test_attention_over_latent_vectors() -> None:
    """By blocks of a partition each, and by blocks that keep what their partitions have summed."""
    args = with_prefixes(share(as_latents(batch(REQUESTS[:2], 3, 1, 576, 16, np.uint16)), [0, 1], 256))
    for way in (args, widened(args, 1 << 17)):
        assert_same_bits(functools.partial(ops.cascade_append_attention, **way))


def test_experts() -> None:
    case = next(case for name, case in OPS["moe_ffn"].inputs.items() if name == "bfloat16-2-slices")
    assert_same_bits(functools.partial(OPS["moe_ffn"].function, **case))
