"""What the attention ops refuse, and that they refuse it before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.native import attention as native
from fastdeploy_sd.ops.reference import attention as reference
from fastdeploy_sd.ops.rope_table import rope_table
from tests.ops.cases.attention import CASCADE_APPEND_ATTENTION, batch
from tests.ops.cases.rope import ROPE_STORE_KV

I32 = np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": np.array([0, 6, 5], I32)}, "query_start_loc: expected offsets that never decrease"),
        ({"query_start_loc": np.array([0, 1, 4], I32)}, "query_start_loc: expected to start at 0 and to end at"),
        ({"query_start_loc": np.array([1, 1, 5], I32)}, "query_start_loc: expected to start at 0"),
        ({"seq_lens": np.array([10, 3], I32)}, "seq_lens: expected at least the request's new tokens"),
        ({"seq_lens": np.array([10, 49], I32)}, "seq_lens: expected at most max_blocks"),
        ({"seq_lens": np.array([10, 33], I32)}, "block_tables: expected a block of the cache"),
        ({"block_tables": np.array([[99, 0, 0], [0, 1, 2]], I32)}, "block_tables: expected a block of the cache"),
    ],
)
def test_attention_refuses_contradictions(change: dict[str, Any], message: str) -> None:
    args = {**batch([(9, 1), (28, 4)], 2, 1, 16, 16, np.float32)}
    assert args["block_tables"].shape == (2, 3)
    with pytest.raises(ValueError, match=message):
        native.cascade_append_attention(**{**args, **change})


def test_attention_refuses_geometries() -> None:
    args = batch([(9, 1)], 2, 1, 16, 16, np.float32)
    with pytest.raises(ValueError, match="num_heads: expected at most 16"):
        native.cascade_append_attention(**{**args, "q": np.zeros((1, 17 * 16), np.float32)})
    for first_key in (-1, 64):
        with pytest.raises(ValueError, match=r"first_key: expected 0\.\.63"):
            native.cascade_append_attention(**{**args, "cache": replace(args["cache"], first_key=first_key)})
    wide = KvCache(np.zeros((4, 1, 272, 16, 1), np.float32), np.zeros((4, 1, 16, 272, 1), np.float32))
    with pytest.raises(ValueError, match=r"head_dim: expected a multiple of 16 in 16\.\.256"):
        native.cascade_append_attention(**{**args, "cache": wide, "q": np.zeros((1, 272), np.float32)})


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
        native.rope_store_kv_(**{**case, name: value})
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


def test_rope_table_linear_is_a_slower_clock() -> None:
    scaled = rope_table(9, 8, 10000.0, {"rope_type": "linear", "factor": 4.0})
    np.testing.assert_array_equal(scaled[::4], rope_table(3, 8, 10000.0))


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_rope_table_keeps_fast_pairs_and_stretches_slow_ones(rope_type: str) -> None:
    limits = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {"attention_factor": 1.0}
    scaling = {"rope_type": rope_type, "factor": 8.0, "original_max_position_embeddings": 1024, **limits}
    scaled, plain = rope_table(65, 64, 10000.0, scaling), rope_table(9, 64, 10000.0)
    np.testing.assert_array_equal(scaled[:9, 0], plain[:, 0])
    np.testing.assert_array_equal(scaled[::8, 31], plain[:, 31])
    assert not np.array_equal(scaled[::8, 16], plain[:, 16])
    assert not np.array_equal(scaled[:9, 16], plain[:, 16])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope_scaling\.rope_type: expected one of .*, got 'dynamic'"),
        ({"rope_type": "linear", "facter": 2.0}, "rope_scaling: expected factor, got 'facter' .did you mean 'factor'"),
        ({"rope_type": "linear"}, r"rope_scaling\.factor: expected a number, got None"),
    ],
)
def test_rope_table_refuses(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_table(4, 4, 100.0, scaling)
