"""Layers with sliding windows: the same bytes whatever the way, and blocks before a window are given back."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, Reference, make_reference, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import open_engine
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, ParallelConfig
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Request
from tests.models import rewrite

pytestmark = pytest.mark.slow

WINDOW = 40
WAYS = [
    EngineVariant("chunks of 16, prefix cache", 4, 4096, 16, 400, enable_prefix_caching=True, num_passes=2,
                  must_hit=True, arrivals_per_step=1),
    EngineVariant("budget of 24, preemption", 8, 24, num_blocks=34, must_preempt=True),
    EngineVariant("blocks of 64, three threads", block_size=64, num_threads=3),
]  # fmt: skip
NUM_REQUESTS = 24


@pytest.fixture(scope="module", params=["bfloat16", "int8 KV"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Two layers of three have a window: they are two KV groups, with the same memory as the first."""
    return make_reference(configure(tmp_path_factory.mktemp("model"), request.param), seed=3, count=NUM_REQUESTS)


def configure(folder: pathlib.Path, storage: str = "bfloat16") -> Config:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    path = rewrite.write_folder(folder / "m", "qwen3-tiny", {"layer_types": types, "sliding_window": WINDOW})
    rewrite.write_file(path / "model.safetensors", rewrite.read("qwen3-tiny"), {"format": "pt"})
    cache = CacheConfig(kv_cache_dtype="int8" if storage == "int8 KV" else "auto")
    return Config(ModelConfig(model=str(path)), cache)


def check(base: Config, way: EngineVariant, method: str, reference: Reference) -> None:
    column = PLAIN if method == "naive" else standard_methods([method], [4])[0]
    cell = run_cell(base, way, column, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None), (way.name, method)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_same_tokens_whatever_the_way(reference: Reference, way: EngineVariant) -> None:
    check(reference.base, way, "naive", reference)


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_same_tokens_whatever_is_drafted(reference: Reference, method: str) -> None:
    check(reference.base, WAYS[["auto", "ngram", "suffix"].index(method) % 2], method, reference)


def test_same_tokens_on_two_ranks(reference: Reference) -> None:
    ranks = ParallelConfig(tensor_parallel_size=2, rank_timeout_s=60.0)
    check(replace(reference.base, parallel=ranks), WAYS[0], "ngram", reference)


def test_same_tokens_where_no_block_is_given_back(reference: Reference) -> None:
    """With a second level of the cache all layers share their blocks."""
    cache = replace(reference.base.cache, swap_space=0.01)
    check(replace(reference.base, cache=cache), WAYS[0], "ngram", reference)


def test_a_long_request_keeps_the_blocks_of_its_full_layers_and_of_its_windows(tmp_path: pathlib.Path) -> None:
    way = EngineVariant("chunks", 1, 64, num_blocks=80)
    base = configure(tmp_path)
    with open_engine(base, way, PLAIN) as engine:
        tokens = 3 + np.arange(900, dtype=np.int32)
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
        engine.submit(Request("long", tokens, sampling, max_tokens=20, seed=0))
        most = 0
        while engine.has_work():
            engine.step()
            kv = engine._scheduler.pool.kv
            most = max(most, kv.num_blocks - kv.num_free_blocks)
        assert 920 // 16 < most <= -(-920 // 16) + 2 * (-(-(WINDOW - 1 + 64) // 16) + 1)
