"""What a block of the KV cache costs in each type, and that this is what is allocated."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.config import SpeculativeConfig, config_from_kwargs
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.spec_decode.proposer import Proposer, ProposerContext
from fastdeploy_sd.worker.executor import create_executor
from fastdeploy_sd.worker.kv import kv_memory, kv_sizing
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv
from tests.models import golden

pytestmark = pytest.mark.slow

CONFIG = read_decoder_config(Checkpoint(golden.ROOT / "qwen3-tiny").config)
LAYERS = LayerKv.of_decoder(CONFIG)
ATTENTION = CONFIG.attentions[0]
# Of a draft model: one head of another size with a hidden row, and twice the target's heads without.
OTHER_LAYERS = [LayerKv(1, 32, 1, 48), LayerKv(2 * ATTENTION.num_kv_heads, ATTENTION.head_dim)]
FORMATS = [
    *(KvCacheFormat(16, "float32", kv) for kv in ("auto", "int8")),
    *(KvCacheFormat(16, "bfloat16", kv) for kv in ("auto", "int8", "fp8")),
]


def num_bytes(tensor: Any) -> int:
    return 0 if tensor is None else int(np.prod(tensor.shape)) * tensor.element_size()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("draft_layers", [[], LayerKv.of_draft_layers(CONFIG, 2), OTHER_LAYERS])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_bytes_of_a_block_are_those_allocated(fmt: KvCacheFormat, draft_layers: list[LayerKv]) -> None:
    layers = LAYERS + draft_layers
    caches = kv_memory.allocate(layers, 3, fmt)
    hidden = kv_memory.allocate_block_hidden(layers, 3, fmt)
    tensors = [x for cache in caches for x in (cache.k, cache.v, cache.k_scale, cache.v_scale)] + hidden
    assert sum(map(num_bytes, tensors)) == 3 * kv_sizing.block_bytes(layers, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_draft_layers_have_a_geometry_of_their_own(fmt: KvCacheFormat) -> None:
    *target, narrow, wide = kv_memory.allocate(LAYERS + OTHER_LAYERS, 3, fmt)
    assert {cache.k.shape[1] for cache in target} == {ATTENTION.num_kv_heads}
    assert [cache.k.shape[1] for cache in (narrow, wide)] == [1, 2 * ATTENTION.num_kv_heads]
    assert [cache.first_key for cache in (*target, narrow, wide)] == [0] * len(target) + [1, 0]
    assert num_bytes(narrow.k) + num_bytes(narrow.v) == 3 * 2 * fmt.block_size * 32 * np.dtype(fmt.kv_storage).itemsize
    assert num_bytes(wide.k) == 2 * num_bytes(target[0].k)
    assert [rows.shape for rows in kv_memory.allocate_block_hidden(LAYERS + OTHER_LAYERS, 3, fmt)] == [[3, 48]]


def test_int8_takes_a_byte_per_element_and_four_per_token_and_head() -> None:
    one = kv_sizing.block_bytes(LAYERS, KvCacheFormat(16, "bfloat16", "int8"))
    assert one == 2 * CONFIG.num_layers * ATTENTION.num_kv_heads * 16 * (ATTENTION.head_dim + 4)


def test_memory_that_the_system_does_not_give_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb, num_gpu_blocks_override: expected .*, got"):
        kv_memory.allocate(LAYERS, 1 << 50, FORMATS[0])


def test_memory_is_taken_only_when_it_is_used() -> None:
    before = resident_bytes()
    caches = kv_memory.allocate(LAYERS, (1 << 30) // kv_sizing.block_bytes(LAYERS, FORMATS[0]), FORMATS[0])
    assert resident_bytes() - before < 1 << 28
    assert len(caches) == CONFIG.num_layers


def test_the_option_reaches_the_layers_and_the_draft_layers() -> None:
    options = {"kv_cache_memory_gb": 0.1, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    draft_types, num_blocks = [], []

    def make_proposer(speculative: SpeculativeConfig, context: ProposerContext) -> Proposer:
        arrays = [x for cache in context.draft_models["mtp"].caches for x in (cache.k, cache.v)]
        draft_types.append({x.dtype for x in arrays if x is not None})
        return create_proposer(speculative, context)

    for name in ("auto", "int8"):
        executor = create_executor(config_from_kwargs(model="demo", kv_cache_dtype=name, **options), make_proposer)
        num_blocks.append(executor.model_info.num_blocks)
        executor.shutdown()
    assert draft_types == [{paddle.bfloat16}, {paddle.int8}]
    # 64 elements per head; the draft layer's hidden rows keep their type.
    assert num_blocks[1] / num_blocks[0] == pytest.approx(128 / 68, rel=0.02)
