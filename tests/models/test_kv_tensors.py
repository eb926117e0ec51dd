"""What a block of the KV cache costs in each type, and that this is what is allocated."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.config import SpeculativeConfig, config_from_kwargs
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.spec_decode.mtp import MtpTarget
from fastdeploy_sd.spec_decode.proposer import Proposer, ProposerContext, create_proposer
from fastdeploy_sd.worker import kv_sizing, kv_tensors
from fastdeploy_sd.worker.executor import create_executor
from fastdeploy_sd.worker.kv_sizing import KvCacheFormat
from tests.models import golden

CONFIG = read_decoder_config(Checkpoint(golden.ROOT / "qwen3-tiny").config)
FORMATS = [KvCacheFormat(16, dtype, is_int8) for dtype in ("float32", "bfloat16") for is_int8 in (False, True)]


def num_bytes(tensor: Any) -> int:
    return 0 if tensor is None else int(np.prod(tensor.shape)) * tensor.element_size()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("num_draft_layers", [0, 2])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_bytes_of_a_block_are_those_allocated(fmt: KvCacheFormat, num_draft_layers: int) -> None:
    caches = kv_tensors.allocate(CONFIG, 3, fmt, num_draft_layers)
    hidden = kv_tensors.allocate_block_hidden(CONFIG, 3, fmt, num_draft_layers)
    tensors = [x for cache in caches for x in (cache.k, cache.v, cache.k_scale, cache.v_scale)] + hidden
    assert sum(map(num_bytes, tensors)) == 3 * kv_sizing.block_bytes(CONFIG, fmt, num_draft_layers)


def test_int8_takes_a_byte_per_element_and_four_per_token_and_head() -> None:
    one = kv_sizing.block_bytes(CONFIG, KvCacheFormat(16, "bfloat16", is_int8=True))
    assert one == 2 * CONFIG.num_layers * CONFIG.num_kv_heads * 16 * (CONFIG.head_dim + 4)


def test_memory_that_the_system_does_not_give_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb, num_gpu_blocks_override: expected .*, got"):
        kv_tensors.allocate(CONFIG, 1 << 50, FORMATS[0])


def test_memory_is_taken_only_when_it_is_used() -> None:
    before = resident_bytes()
    caches = kv_tensors.allocate(CONFIG, (1 << 30) // kv_sizing.block_bytes(CONFIG, FORMATS[0]), FORMATS[0])
    assert resident_bytes() - before < 1 << 28
    assert len(caches) == CONFIG.num_layers


def test_the_option_reaches_the_layers_and_the_draft_layers() -> None:
    options = {"kv_cache_memory_gb": 0.1, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    draft_types, num_blocks = [], []

    def make_proposer(speculative: SpeculativeConfig, context: ProposerContext) -> Proposer:
        assert isinstance(context.target, MtpTarget)
        draft_types.append({x.dtype for cache in context.target.caches for x in (cache.k, cache.v)})
        return create_proposer(speculative, context)

    for name in ("auto", "int8"):
        executor = create_executor(config_from_kwargs(model="demo", kv_cache_dtype=name, **options), make_proposer)
        num_blocks.append(executor.model_info.num_blocks)
        executor.shutdown()
    assert draft_types == [{paddle.bfloat16}, {paddle.int8}]
    # 64 elements per head; the draft layer's hidden rows keep their type.
    assert num_blocks[1] / num_blocks[0] == pytest.approx(128 / 68, rel=0.02)
