"""Where sums are cut, and what each rank has of a decoder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig, MoeConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import DecoderShard, SumPart, attention_slices, expert_slices, feed_forward_slices
from fastdeploy_sd.types.ranges import SliceRule
from fastdeploy_sd.types.shard import Shard

pytestmark = pytest.mark.slow


@pytest.fixture
def config(golden_dir: Path) -> DecoderConfig:
    return read_decoder_config(Checkpoint(golden_dir / "qwen3-tiny").config)


ATTENTION, DENSE = AttentionConfig(8, 2, 64), DenseConfig(896)


def ranks(config: DecoderConfig, size: int) -> list[DecoderShard]:
    return [DecoderShard(config, Shard(rank, size)) for rank in range(size)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "count"),
    [(16, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (4, 1, 4), (12, 6, 2), (14, 2, 2), (6, 1, 2), (12, 3, 1), (7, 7, 1)],
)
def test_attention_is_cut_at_heads_whose_kv_heads_can_be_shared_out(
    num_heads: int, num_kv_heads: int, count: int
) -> None:
    assert attention_slices(AttentionConfig(num_heads, num_kv_heads, 64)) == SliceRule(count, num_heads * 64 // count)


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        (3072, SliceRule(4, 128)), (896, SliceRule(4, 128)), (512, SliceRule(4, 128)), (384, SliceRule(4, 96)),
        (320, SliceRule(4, 80)), (1000, SliceRule(4, 250)), (770, SliceRule(2, 385)), (771, SliceRule(1, 771)),
    ],
)  # fmt: skip
def test_feed_forward_networks_are_cut_at_groups_where_they_are_wide(size: int, rule: SliceRule) -> None:
    assert feed_forward_slices(size) == rule


def test_experts_are_cut_into_as_many_slices_as_divide_them() -> None:
    assert [expert_slices(count).count for count in (64, 6, 5)] == [4, 2, 1]


def test_heads_go_with_the_kv_heads_they_read(config: DecoderConfig) -> None:
    heads = AttentionConfig(8, 2, 16)
    assert [r.kv_heads(heads) for r in ranks(config, 2)] == [range(1), range(1, 2)]
    # Of two KV heads over four ranks, two ranks have the same one.
    assert [r.kv_heads(heads) for r in ranks(config, 4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert ranks(config, 4)[2].qkv(heads) == (range(64, 96), range(144, 160), range(176, 192))
    assert ranks(config, 4)[2].attention(heads) == SumPart(range(64, 96), SliceRule(1, 32))
    assert ranks(config, 2)[1].attention(heads) == SumPart(range(64, 128), SliceRule(2, 32))
    whole = DecoderShard(config)
    assert whole.qkv(heads) == (range(128), range(128, 160), range(160, 192))
    assert whole.attention(heads) == SumPart(range(128), SliceRule(4, 32))


def test_wide_networks_are_shared_out_by_groups(config: DecoderConfig) -> None:
    parts = [r.feed_forward(896) for r in ranks(config, 2)]
    assert parts == [SumPart(range(384), SliceRule(2, 128)), SumPart(range(384, 896), SliceRule(2, 128))]
    assert [len(r.feed_forward(896).inputs) for r in ranks(config, 4)] == [128, 256, 256, 256]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_everything_once(config: DecoderConfig, size: int) -> None:
    config, moe = replace(config, vocab_size=1000, hidden_size=192), MoeConfig(8, 2, 64, 128)
    group = ranks(config, size)
    for ranges, count in (
        ([r.attention(ATTENTION).inputs for r in group], 8 * 64),
        ([r.feed_forward(896).inputs for r in group], 896),
        ([r.experts(moe).inputs for r in group], 8),
        ([r.shared_experts(moe).inputs for r in group], 128),
        ([r.vocabulary() for r in group], 1000),
        ([r.hidden() for r in group], 192),
    ):
        assert [i for part in ranges for i in part] == list(range(count))
        assert all(len(part) > 0 for part in ranges)


MOE = MoeConfig(6, 2, 64, 128, num_experts_field="moe_num_experts")
ODD_SHARED = MoeConfig(8, 2, 33, 99)


@pytest.mark.parametrize(
    ("change", "size", "told"),
    [
        (
            AttentionConfig(14, 2, 64),
            4,
            "at most 2, .* num_attention_heads, num_key_value_heads: 14 query heads over 2 KV heads",
        ),
        (AttentionConfig(12, 3, 64), 2, "at most 1, .* num_attention_heads, num_key_value_heads: 12 query"),
        (DenseConfig(770), 4, "at most 2, .* intermediate_size: 770"),
        (MOE, 4, "at most 2, .* moe_num_experts: 6"),
        (ODD_SHARED, 2, "at most 1, .* moe_intermediate_size [*] moe_num_shared_experts: 99"),
        (100, 4, "at most 3, .* vocab_size: 100"),
    ],
)
def test_what_cannot_be_shared_out_is_named(
    config: DecoderConfig, change: AttentionConfig | DenseConfig | MoeConfig | int, size: int, told: str
) -> None:
    """Also where only the last layer is so."""
    layer = LayerConfig(ATTENTION, DENSE)
    if isinstance(change, int):
        config, last = replace(config, vocab_size=change), layer
    else:
        last = LayerConfig(change, DENSE) if isinstance(change, AttentionConfig) else LayerConfig(ATTENTION, change)
    config = replace(config, layers=(layer, layer, last))
    with pytest.raises(ConfigError) as refusal:
        DecoderShard(config, Shard(0, size)).verify()
    expected = rf"tensor_parallel_size: expected {told}.*, got {size}"
    assert re.fullmatch(expected, refusal.value.message), refusal.value.message
    assert refusal.value.param == "tensor_parallel_size"
    DecoderShard(config).verify()


def test_layers_of_experts_alone_need_no_dense_width(config: DecoderConfig) -> None:
    config = replace(config, layers=(LayerConfig(ATTENTION, DENSE),) * 2, dense=DenseConfig(771))
    config = config.with_experts(replace(MOE, num_experts=8, shared_intermediate_size=0), range(2))
    DecoderShard(config, Shard(0, 4)).verify()


@pytest.mark.parametrize(
    ("name", "field"), [("ernie4_5_moe-tiny", "moe_num_experts"), ("qwen3_moe-tiny", "num_local_experts")]
)
def test_experts_are_counted_under_the_name_of_their_family(golden_dir: Path, name: str, field: str) -> None:
    moe = read_decoder_config(Checkpoint(golden_dir / name).config).moe
    assert moe is not None
    assert moe.num_experts_field == field
