"""What the attention ops refuse, and that they refuse it before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.kv_cache import KvCache, RequestBlocks, Rotary, kv_cache_shapes
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.rope_table import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    rope_table,
    yarn_amplitude,
)
from tests.ops.cases.attention import CASCADE_APPEND_ATTENTION, batch, share, with_prefixes
from tests.ops.cases.rope import ROPE_STORE_KV

I32 = np.int32


def blocks(table_rows: list[int], tables: list[list[int]]) -> RequestBlocks[np.ndarray]:
    return RequestBlocks(np.array(table_rows, I32), np.array(tables, I32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": np.array([0, 6, 5], I32)}, "query_start_loc: expected offsets that never decrease"),
        ({"query_start_loc": np.array([0, 1, 4], I32)}, "query_start_loc: expected to start at 0 and to end at"),
        ({"query_start_loc": np.array([1, 1, 5], I32)}, "query_start_loc: expected to start at 0"),
        ({"seq_lens": np.array([10, 3], I32)}, "seq_lens: expected at least the request's new tokens"),
        ({"seq_lens": np.array([10, 49], I32)}, "seq_lens: expected at most max_blocks"),
        ({"seq_lens": np.array([10, 33], I32)}, "block_tables: expected a block of the cache"),
        ({"blocks": blocks([1, 0], [[99, 0, 0], [0, 1, 2]])}, "block_tables: expected a block of the cache"),
        ({"blocks": blocks([0, 2], [[0, 0, 0], [0, 1, 2]])}, "table_rows: expected rows of block_tables"),
        ({"blocks": blocks([-1, 0], [[0, 0, 0], [0, 1, 2]])}, "table_rows: expected rows of block_tables"),
    ],
)
def test_attention_refuses_contradictions(change: dict[str, Any], message: str) -> None:
    args = {**batch([(9, 1), (28, 4)], 2, 1, 16, 16, np.float32)}
    assert args["blocks"].block_tables.shape == (2, 3)
    with pytest.raises(ValueError, match=message):
        ops.cascade_append_attention(**{**args, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_rows": {(0, 1): 9}}, "group_rows: expected rows of q, got one outside"),
        ({"group_rows": {(0, 0): -1}}, "group_rows: expected rows of q, got one outside"),
        ({"group_starts": {0: 1}}, "group_starts: expected to start at 0"),
        ({"group_starts": {3: 65 * 3}}, "group_starts: expected to start at 0 and to end within"),
        ({"group_starts": {1: 4}}, "group_starts: expected offsets that rise"),
        ({"group_leaders": {0: 3}}, "group_leaders: expected a request of each group"),
        ({"group_leaders": {0: 2}}, "group_leaders: expected a request of each group"),
        ({"group_places": {0: -1}}, "group_places: expected places in group_rows"),
        ({"group_places": {1: 3}}, "group_places: expected places in group_rows"),
        ({"group_places": {1: 2}}, "group_places: expected a request's rows in a group that shares as much"),
        ({"shared_partitions": {1: 1}}, "group_places: expected a request's rows in a group that shares as much"),
        ({"shared_partitions": {0: 3}}, "shared_partitions: expected whole ones before the new tokens"),
    ],
)
def test_attention_refuses_other_calls_groups(change: dict[str, dict[Any, int]], message: str) -> None:
    args = with_prefixes(share(batch([(600, 1), (520, 2), (300, 1)], 2, 1, 16, 16, np.float32), [0, 1], 512))
    np.testing.assert_array_equal(args["prefixes"].group_starts, [0, 3, 3, 3])
    for name, changes in change.items():
        for at, value in changes.items():
            getattr(args["prefixes"], name)[at] = value
    with pytest.raises(ValueError, match=message):
        ops.cascade_append_attention(**args)


def test_attention_refuses_geometries() -> None:
    args = batch([(9, 1)], 2, 1, 16, 16, np.float32)
    with pytest.raises(ValueError, match="num_heads: expected at most 256"):
        ops.cascade_append_attention(**{**args, "q": np.zeros((1, 257 * 16), np.float32)})
    for first_key in (-1, 64):
        with pytest.raises(ValueError, match=r"first_key: expected 0\.\.63"):
            ops.cascade_append_attention(**{**args, "cache": replace(args["cache"], first_key=first_key)})
    wide = KvCache(np.zeros((4, 1, 272, 16, 1), np.float32), np.zeros((4, 1, 16, 272, 1), np.float32))
    with pytest.raises(ValueError, match=r"head_dim: expected a multiple of 16 in 16\.\.256"):
        ops.cascade_append_attention(**{**args, "cache": wide, "q": np.zeros((1, 272), np.float32)})
    for cache, message in (
        (KvCache(np.zeros((4, 1, 656, 16, 1), np.float32), None), "head_dim: .* or up to 640 where keys are values"),
        (KvCache(np.zeros((4, 2, 16, 16, 1), np.float32), None), "num_kv_heads: expected 1 where keys are values"),
    ):
        q = np.zeros((1, cache.head_dim * cache.num_kv_heads), np.float32)
        with pytest.raises(ValueError, match=message):
            ops.cascade_append_attention(**{**args, "cache": cache, "q": q})


def test_storing_needs_the_cache_of_its_kind() -> None:
    """Keys with values, or latent vectors alone; bytes with scales are no latent vectors."""
    k, v = (np.zeros(shape, np.float32) for shape in kv_cache_shapes(2, 16, 1, 16, 4))
    maps: tuple[Any, Any, Rotary[Any]] = np.zeros(1, I32), np.zeros(1, np.int64), Rotary(rope_table(4, 16, 1e4))
    with pytest.raises(ValueError, match="v: expected values besides the keys, got none"):
        ops.rope_store_kv_(np.zeros((1, 48), np.float32), KvCache(k, None), *maps)
    x = np.zeros((1, 16), np.float32)
    with pytest.raises(ValueError, match="v: expected none, as keys are the values, got some"):
        ops.rope_store_latent_(x, x, KvCache(k, v), *maps)
    scale = np.zeros((2, 1, 16), np.float32)
    bytes_alone = KvCache(np.zeros((2, 1, 4, 16, 4), np.int8), None, k_scale=scale, v_scale=scale)
    with pytest.raises(ValueError, match="v: expected values besides keys of int8 or float8, got none"):
        ops.rope_store_latent_(x, x, bytes_alone, *maps)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("positions", np.array([0, 1, 3000], I32), "positions: expected values in"),
        ("positions", np.array([0, 1, -1], I32), "positions: expected values in"),
        ("slot_mapping", np.array([0, 1, 64]), "slot_mapping: expected -1 or a slot"),
        ("slot_mapping", np.array([0, 1, -2]), "slot_mapping: expected -1 or a slot"),
    ],
)
def test_rope_refuses_indices_and_writes_nothing(name: str, value: np.ndarray, message: str) -> None:
    case = dict(next(case for key, case in ROPE_STORE_KV.inputs.items() if "-3x" in key))
    case["cache"] = KvCache(case["cache"].k.copy(), case["cache"].v.copy())
    before = case["cache"].k.copy()
    with pytest.raises(ValueError, match=message):
        ops.rope_store_kv_(**{**case, name: value})
    np.testing.assert_array_equal(case["cache"].k, before)


def test_layout_round_trip() -> None:
    for case in CASCADE_APPEND_ATTENTION.inputs.values():
        k = case["cache"].k
        np.testing.assert_array_equal(reference.pack_k(reference.unpack_k(k)), k)
        v = case["cache"].v
        np.testing.assert_array_equal(reference.pack_v(reference.unpack_v(v)), v)


def test_rope_table_default_is_exact_at_known_angles() -> None:
    table = rope_table(4, 4, 100.0)
    angles = np.outer(np.arange(4), [1.0, 0.1])
    np.testing.assert_array_equal(table, np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


def test_rope_table_is_the_same_however_many_rows_it_has() -> None:
    long, angles = rope_table(20_000, 4, 100.0), np.outer(np.arange(20_000.0), [1.0, 0.1])
    np.testing.assert_array_equal(long, np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


def test_rope_table_linear_is_a_slower_clock() -> None:
    scaled = rope_table(9, 8, 10000.0, LinearScaling(4.0))
    np.testing.assert_array_equal(scaled[::4], rope_table(3, 8, 10000.0))


@pytest.mark.parametrize("scaling", [Llama3Scaling(8.0, 1.0, 4.0, 1024), YarnScaling(8.0, 1024, 1.0)])
def test_rope_table_keeps_fast_pairs_and_stretches_slow_ones(scaling: RopeScaling) -> None:
    scaled, plain = rope_table(65, 64, 10000.0, scaling), rope_table(9, 64, 10000.0)
    np.testing.assert_array_equal(scaled[:9, 0], plain[:, 0])
    np.testing.assert_array_equal(scaled[::8, 31], plain[:, 31])
    assert not np.array_equal(scaled[::8, 16], plain[:, 16])
    assert not np.array_equal(scaled[:9, 16], plain[:, 16])


def test_yarn_widens_cosines_by_the_logarithm_of_its_factor() -> None:
    assert yarn_amplitude(1.0) == 1.0
    assert yarn_amplitude(40.0, 0.707) == pytest.approx(0.1 * 0.707 * np.log(40.0) + 1.0)
    scaled = rope_table(2, 64, 10000.0, YarnScaling(4.0, 1024, 1.5))
    np.testing.assert_array_equal(scaled[0, :32], np.float32(1.5))
