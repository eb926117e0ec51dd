"""How many KV blocks there are by default, and what is refused. Nothing here looks at this machine's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.types.kv_groups import KvGroup
from fastdeploy_sd.worker.kv.kv_layout import KvLayout
from fastdeploy_sd.worker.kv.kv_sizing import (
    KvCacheFormat,
    KvRoom,
    LayerKv,
    block_bytes,
    choose_size,
    half_of,
)

GIB = 1 << 30
ONE_BLOCK = 1 << 20


def config(max_model_len: int | None = None, max_num_seqs: int = 4, **cache: Any) -> Config:
    return Config(
        model=ModelConfig(model="m", max_model_len=max_model_len),
        cache=CacheConfig(block_size=64, **cache),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


def never() -> KvRoom:
    raise AssertionError("the size was given; what is free does not matter")


def test_what_requests_can_use_is_enough() -> None:
    size = choose_size(config(), ONE_BLOCK, 1000, lambda: half_of(64 * GIB))
    assert (size.num_blocks, size.reason) == (4 * 16, "max_num_seqs 4 x 1000 tokens")
    assert size.describe(1000) == (
        "4096 tokens in 64 blocks of 64, 0.06 GiB when all are in use (max_num_seqs 4 x 1000 tokens);"
        " room for 4.1 requests of 1000 tokens"
    )


def test_more_than_is_free_is_told_with_what_is() -> None:
    size = choose_size(config(kv_cache_memory_gb=500), ONE_BLOCK, 4096, never)
    assert size.describe(4096).endswith("room for 8000 requests of 4096 tokens")
    assert size.shortage(500 * GIB) is None
    assert size.shortage(20 * GIB) == (
        "the KV cache may take 500.00 GiB (kv_cache_memory_gb 500), but 20.00 GiB of memory are free: the system may"
        " end the server when more is in use"
    )


def test_engines_of_one_machine_divide_its_memory() -> None:
    of_one, of_four = half_of(8 * GIB), half_of(8 * GIB, 4)
    assert (of_four.num_bytes, of_four.reason) == (
        of_one.num_bytes // 4,
        "half of the 8.00 GiB that are free, among 4 engines",
    )
    size = choose_size(config(kv_cache_memory_gb=2), ONE_BLOCK, 4096, never)
    assert size.shortage(8 * GIB, 4) is None
    assert " in each of 5 engines, but 8.00 GiB" in (size.shortage(8 * GIB, 5) or "")


def test_half_of_what_is_free_is_the_limit() -> None:
    size = choose_size(config(max_num_seqs=256), ONE_BLOCK, 100_000, lambda: half_of(3 * GIB))
    assert (size.num_blocks, size.num_tokens) == (1536, 1536 * 64)
    assert size.reason == "half of the 3.00 GiB that are free"


@pytest.mark.parametrize(
    ("cache", "num_blocks", "reason"),
    [
        ({"kv_cache_memory_gb": 1.5}, 1536, "kv_cache_memory_gb 1.5"),
        ({"num_blocks": 7}, 7, "num_gpu_blocks_override"),
        ({"num_blocks": 7, "kv_cache_memory_gb": 1.5}, 7, "num_gpu_blocks_override"),
    ],
)
def test_a_given_size_is_exact(cache: dict[str, Any], num_blocks: int, reason: str) -> None:
    size = choose_size(config(**cache), ONE_BLOCK, 1000, never)
    assert (size.num_blocks, size.reason) == (num_blocks, reason)


@pytest.mark.parametrize(
    ("cache", "got"),
    [({"kv_cache_memory_gb": 0.5}, "kv_cache_memory_gb 0.5"), ({}, "half of the 1.00 GiB that are free")],
)
def test_less_than_a_block_is_an_error(cache: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_size(config(**cache), GIB, 1000, lambda: half_of(GIB))
    assert caught.value.message == f"kv_cache_memory_gb: expected at least 1.000 (one block), got {got}"


def test_a_gpus_room_is_taken_whole_and_is_what_errors_are_about() -> None:
    room = KvRoom(3 * ONE_BLOCK, "what a GPU has", "gpu_memory_utilization", takes_all=True)
    size = choose_size(config(max_num_seqs=1), ONE_BLOCK, 64, lambda: room)
    assert (size.num_blocks, size.reason) == (3, "what a GPU has")
    with pytest.raises(ConfigError) as caught:
        choose_size(config(), 4 * ONE_BLOCK, 64, lambda: room)
    assert caught.value.param == "gpu_memory_utilization"
    assert caught.value.message == (
        "gpu_memory_utilization: expected what leaves memory for a KV block, 0.004 GiB, got what a GPU has"
    )


def test_a_length_that_was_asked_for_is_held_or_refused() -> None:
    two: dict[str, Any] = {"kv_cache_memory_gb": 2 / 1024}
    assert choose_size(config(129, **two), ONE_BLOCK, 129, never).num_blocks == 2
    with pytest.raises(ConfigError) as caught:
        choose_size(config(130, **two), ONE_BLOCK, 130, never)
    assert caught.value.message == (
        "max_model_len: expected at most 129, the tokens of one request that the KV cache holds"
        " (kv_cache_memory_gb 0.00195312), got 130, which takes kv_cache_memory_gb 0.003"
    )


def test_the_limit_of_a_request_is_what_both_context_and_cache_hold() -> None:
    info = ModelInfo("m", 100, max_model_len=129, eos_token_ids=(), block_size=64, num_blocks=2)
    assert info.max_request_tokens == 129
    assert replace(info, max_model_len=128).max_request_tokens == 128
    assert replace(info, max_model_len=4096).max_request_tokens == 129


BF16 = KvCacheFormat(16, "bfloat16")
LIMITS = Config(
    ModelConfig(model="m"), scheduler=SchedulerConfig(max_num_batched_tokens=256, long_prefill_token_threshold=0)
)


def test_layers_of_one_kind_are_one_group_whatever_their_sizes() -> None:
    layers, drafts = [LayerKv(4, 64)] * 3, [LayerKv(2, 32, 1, 128)]
    layout = KvLayout.create(layers, drafts, BF16, LIMITS)
    assert (layout.groups, layout.members) == ((KvGroup(16, None, 256),), ((0, 1, 2, 3),))
    assert layout.block_bytes == block_bytes(layers + drafts, BF16)


def test_windows_have_groups_of_as_many_layers_as_full_attention() -> None:
    """One layer in six attends to all tokens; the last group has room for two layers more."""
    full, window = LayerKv(4, 64), LayerKv(4, 64, window=1024)
    layers = [full if i % 6 == 5 else window for i in range(24)]
    layout = KvLayout.create(layers, [], BF16, LIMITS)
    assert layout.groups == (KvGroup(16, None, 256), *[KvGroup(16, 1024, 256)] * 5)
    assert layout.members[0] == (5, 11, 17, 23)
    assert sorted(i for members in layout.members for i in members) == list(range(24))
    assert [len(members) for members in layout.members] == [4] * 6
    assert layout.block_bytes == block_bytes([full] * 4, BF16)


def test_draft_layers_are_in_the_first_group_whatever_they_keep() -> None:
    """A group of fewer layers has blocks of as many tokens."""
    layers, drafts = [LayerKv(4, 64), LayerKv(4, 64)] + [LayerKv(4, 64, window=100)] * 3, [LayerKv(2, 32, 1, 128)]
    layout = KvLayout.of_model(layers, drafts, BF16, LIMITS)
    assert layout.groups == (KvGroup(16, None, 256), KvGroup(16, 100, 256), KvGroup(16, 100, 256))
    assert layout.members == ((0, 1, 5), (2, 3), (4,))
    assert (layout.block_bytes, layout.why_kept) == (block_bytes([*layers[:2], *drafts], BF16), "")


def test_draft_layers_with_a_window_find_what_they_read_while_they_lag() -> None:
    windows, speculative = [LayerKv(4, 64, window=100)] * 3, SpeculativeConfig("ngram", num_speculative_tokens=5)
    config = replace(LIMITS, speculative=speculative)
    assert KvLayout.of_model(windows, [windows[0]], BF16, config).groups == (KvGroup(16, 100 + 16 + 5, 256),)
    kept = KvLayout.of_model(windows, [LayerKv(4, 64)], BF16, config)
    assert (kept.groups, kept.why_kept) == ((KvGroup(16, None, 256),), "draft layers without a window share them")


def test_requests_with_windows_need_fewer_blocks() -> None:
    """Of a window of 100 tokens and steps of 64 a request has 4 blocks of 64 at most."""
    groups = KvGroup(64), KvGroup(64, 100, 64)
    size = choose_size(config(), ONE_BLOCK, 1000, lambda: half_of(64 * GIB), groups)
    assert (size.num_blocks, size.token_bytes) == (4 * (16 + 4), ONE_BLOCK // 64)
    limited = choose_size(config(num_blocks=20), ONE_BLOCK, 1000, never, groups)
    assert limited.num_tokens == 16 * 64
    with pytest.raises(ConfigError, match=r"max_model_len: expected at most 1025, .* takes kv_cache_memory_gb 0.021"):
        choose_size(config(1026, kv_cache_memory_gb=20 / 1024), ONE_BLOCK, 2000, never, groups)
