"""Rows of trees against enumeration: each has the bits of the chain that leads to it, and what is kept those of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.device import device
from fastdeploy_sd.ops.compaction import compact_kv_, compact_rows_
from fastdeploy_sd.ops.kv_cache import KvCache, VerifiedPaths
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.reference.batch import Tables, prepare_batch
from fastdeploy_sd.types import DraftTokens
from tests.models.steps import BLOCK_SIZE, Model, Step, batches
from tests.values import i32

NUM_NODES, NUM_TOKENS = 63, 71


def step_of(draft: DraftTokens, blocks: np.ndarray) -> tuple[Step, np.ndarray]:
    """The step after NUM_TOKENS - 1 that runs the newest token and these drafts; its tree mask."""
    tokens = np.arange(4, 4 + NUM_TOKENS, dtype=np.int32)[None]
    tables = Tables(tokens, i32(NUM_TOKENS), blocks)
    maps = prepare_batch(tables, i32(0), i32(NUM_TOKENS - 1), i32(1 + len(draft.token_ids)), draft, BLOCK_SIZE)
    columns = {name: getattr(maps, name) for name in Step._fields if name != "blocks"}
    return Step(**columns, blocks=blocks), maps.tree_mask


@pytest.mark.parametrize(("dtype", "is_int8_kv"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_every_node_has_the_bits_of_its_path(dtype: str, is_int8_kv: bool) -> None:
    rng = np.random.default_rng(1)
    model = Model("qwen3-tiny", dtype, is_int8_kv=is_int8_kv)
    [prompt] = batches([([NUM_TOKENS - 1], False)])
    model.load(prompt)
    for forward in (model.recorded, model.eager):
        model.bits(forward)
    parents = np.array([rng.integers(max(-1, i - 6), i) for i in range(NUM_NODES)], np.int32)
    tree = DraftTokens(rng.integers(4, 400, NUM_NODES).astype(np.int32), i32(0, NUM_NODES), parents=parents)
    blocks = np.arange(12, dtype=np.int32)[None]
    step, mask = step_of(tree, blocks)
    model.load(step)
    model.memory.tree_mask[: len(mask)] = mask
    hidden, logits = model.bits(model.recorded)
    model.memory.tree_mask[:] = -1
    longest = max((tree.path(0, node) for node in range(NUM_NODES)), key=len)
    for path in [*(tree.path(0, node) for node in range(-1, NUM_NODES)), longest]:
        chain = DraftTokens(tree.token_ids[path], i32(0, len(path)))
        model.load(step_of(chain, blocks)[0])
        own_hidden, own = model.bits(model.eager)
        np.testing.assert_array_equal(own[-1], logits[path[-1] + 1 if path else 0])
    rows = np.array([0, *(node + 1 for node in longest)], np.int32)
    output_rows = np.concatenate([rows, np.zeros(NUM_NODES + 1 - len(rows), np.int32)])
    paths = VerifiedPaths(
        i32(0, NUM_NODES + 1), i32(0, len(rows)), output_rows, np.arange(NUM_NODES + 1, dtype=np.int32)
    )
    tensors = VerifiedPaths(*map(device().wrap, paths))
    for cache in model.caches:
        compact_kv_(cache, tensors, device().wrap(step.slot_mapping))
    end = NUM_TOKENS + len(longest)
    for got, want in zip(model.caches, model.eager_caches, strict=True):
        for kept, of_chain in zip(_first(got, end), _first(want, end), strict=True):
            np.testing.assert_array_equal(kept, of_chain)
    compact_rows_(hidden, paths)
    np.testing.assert_array_equal(hidden[: len(rows)], own_hidden)


def _first(cache: KvCache[Any], count: int) -> list[np.ndarray]:
    """k, v and scales of the first tokens of the blocks."""
    tokens = [reference.unpack_k(cache.k.numpy())]
    tokens += [] if cache.v is None else [reference.unpack_v(cache.v.numpy())]
    tokens += [scale.numpy().transpose(0, 2, 1) for scale in (cache.k_scale, cache.v_scale) if scale is not None]
    return [blocks.reshape(-1, *blocks.shape[2:])[:count] for blocks in tokens]
