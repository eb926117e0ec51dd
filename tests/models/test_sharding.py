"""Where sums are cut, and that published models keep their scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import attention_slices, feed_forward_slices
from fastdeploy_sd.parallel.ranges import SliceRule


@pytest.fixture
def config(golden_dir: Path) -> DecoderConfig:
    return replace(read_decoder_config(Checkpoint(golden_dir / "qwen3-tiny").config), head_dim=64)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "count"),
    [(16, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (4, 1, 4), (12, 6, 2), (14, 2, 2), (6, 1, 2), (12, 3, 1), (7, 7, 1)],
)
def test_attention_is_cut_at_heads_whose_kv_heads_can_be_shared_out(
    config: DecoderConfig, num_heads: int, num_kv_heads: int, count: int
) -> None:
    config = replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert attention_slices(config) == SliceRule(count, num_heads * 64 // count)


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        (3072, SliceRule(4, 128)), (896, SliceRule(4, 128)), (512, SliceRule(4, 128)), (384, SliceRule(4, 96)),
        (320, SliceRule(4, 80)), (1000, SliceRule(4, 250)), (770, SliceRule(2, 385)), (771, SliceRule(1, 771)),
    ],
)  # fmt: skip
def test_feed_forward_networks_are_cut_at_groups_where_they_are_wide(size: int, rule: SliceRule) -> None:
    assert feed_forward_slices(size) == rule
