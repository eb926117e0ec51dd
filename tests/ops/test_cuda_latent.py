"""Attention over latent vectors on GPUs: long keys that are the values; emulated, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.cases.attention import batch, share, with_prefixes
from tests.ops.cases.latent import as_latents
from tests.ops.cases.trees import random_tree
from tests.ops.cuda_device import OpRunner
from tests.ops.test_cuda_attention_sharing import widened

pytestmark = pytest.mark.slow

# The first three share a partition.
REQUESTS = [(300, 1), (520, 3), (257, 2), (0, 3), (255, 1)]


def call(dtype: Any, head_dim: int = 576, num_heads: int = 5) -> dict[str, Any]:
    return share(as_latents(batch(REQUESTS, num_heads, 1, head_dim, 16, dtype)), [0, 1, 2], 256)


@pytest.mark.parametrize("head_dim", [48, 144, 272, 576])
@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
def test_attention_is_what_it_means_however_partitions_are_computed(
    device: OpRunner, dtype: Any, head_dim: int
) -> None:
    """By blocks of their own, or one after the other; alone, in groups that share a prefix, and in trees."""
    args = call(dtype, head_dim)
    masks = np.concatenate([random_tree(np.random.default_rng(1), count) for _, count in REQUESTS])
    for mask in (None, masks):
        ways = [args, widened(args, 1 << 17), with_prefixes(args), with_prefixes(widened(args, 1 << 17))]
        with device.runs_ops():
            found = [ops.cascade_append_attention(**way, tree_mask=mask) for way in ways]
        for got in found[1:]:
            np.testing.assert_array_equal(got, found[0])
        want = reference.cascade_append_attention(**args, tree_mask=mask)
        np.testing.assert_allclose(widen(found[0]), widen(want), rtol=2.0**-7, atol=2.0**-6)


def test_a_value_that_is_not_finite_is_for_the_rows_that_see_it(device: OpRunner) -> None:
    args = call(np.uint16)
    with device.runs_ops():
        want = ops.cascade_append_attention(**args)
    k = args["cache"].k.copy()
    block, offset = divmod(521, 16)  # the second of the new tokens of request 1, whose rows are 1 to 3
    k[args["blocks"].block_tables[args["blocks"].table_rows[1], block], 0, :, offset] = 0x7FC0
    with device.runs_ops():
        got = ops.cascade_append_attention(**{**args, "cache": replace(args["cache"], k=k)})
    np.testing.assert_array_equal(np.delete(got, (2, 3), axis=0), np.delete(want, (2, 3), axis=0))
    assert np.isnan(widen(got[2:4])).all()


def test_long_vectors_of_float32_are_refused(device: OpRunner) -> None:
    args = as_latents(batch([(20, 1)], 2, 1, 272, 16, np.float32))
    with device.runs_ops(), pytest.raises(ValueError, match="head_dim: expected at most 256 elements of float32"):
        ops.cascade_append_attention(**args)
