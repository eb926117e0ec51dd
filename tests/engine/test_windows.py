"""Layers with sliding windows: the same bytes whatever the way, and blocks before a window are given back."""

from __future__ import annotations

import pathlib
import random
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.cli.verify import (
    PLAIN,
    EngineVariant,
    Method,
    Reference,
    compare,
    make_reference,
    run_alone,
    run_cell,
    standard_methods,
)
from fastdeploy_sd.cli.verify.runs import open_engine
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, ParallelConfig, SpeculativeConfig
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Request
from tests.doubles.engines import most_blocks
from tests.engine import test_handover, test_swap
from tests.engine.handover_pairs import open_pair
from tests.models.mtp_models import make_model
from tests.models.rewrite import add_windows

pytestmark = pytest.mark.slow

WINDOW = 40
WAYS = [
    EngineVariant("chunks of 16, prefix cache", 4, 4096, 16, 400, enable_prefix_caching=True, num_passes=2,
                  must_hit=True, arrivals_per_step=1),
    EngineVariant("budget of 24, preemption", 8, 24, num_blocks=34, must_preempt=True),
    EngineVariant("blocks of 64, three threads", block_size=64, num_threads=3),
]  # fmt: skip
NUM_REQUESTS = 24
# One long request, and the blocks of its full layer, and of its window in each of the others.
LONG = EngineVariant("chunks", 1, 64, num_blocks=80)
MOST_BLOCKS = -(-920 // 16) + 2 * (-(-(WINDOW - 1 + 64) // 16) + 1)


@pytest.fixture(scope="module", params=["bfloat16", "int8 KV"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Two layers of three have a window: they are two KV groups, with the same memory as the first."""
    return make_reference(configure(tmp_path_factory.mktemp("model"), request.param), seed=3, count=NUM_REQUESTS)


def configure(folder: pathlib.Path, storage: str = "bfloat16", windowed: int = 2) -> Config:
    """Of a model with a draft layer, whose last layers have a window."""
    types = ["full_attention"] * (3 - windowed) + ["sliding_attention"] * windowed
    path = make_model(folder / "m", "qwen3-tiny", "numbered").path
    add_windows(path, types, WINDOW)
    cache = CacheConfig(kv_cache_dtype="int8" if storage == "int8 KV" else "auto")
    return Config(ModelConfig(model=str(path)), cache)


def check(base: Config, way: EngineVariant, method: str, reference: Reference) -> None:
    cell = run_cell(base, way, column_of(method), reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None), (way.name, method)


def column_of(method: str) -> Method:
    return PLAIN if method == "naive" else standard_methods([method], [4])[0]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_same_tokens_whatever_the_way(reference: Reference, way: EngineVariant) -> None:
    check(reference.base, way, "naive", reference)


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto", "mtp"])
def test_same_tokens_whatever_is_drafted(reference: Reference, method: str) -> None:
    check(reference.base, WAYS[["auto", "ngram", "suffix", "mtp"].index(method) % 2], method, reference)


@pytest.mark.parametrize("windowed", [2, 3])
def test_a_draft_model_reads_what_it_needs_late(tmp_path: pathlib.Path, windowed: int) -> None:
    """It is the target itself, so each greedy draft is right, also after a prompt with blocks that no window needs."""
    config = configure(tmp_path, windowed=windowed)
    drafting = SpeculativeConfig(model=config.model.model, quantization="none", draft_head_quantization="target")
    [column] = standard_methods(["draft_model"], [4], drafting)
    prompts = [np.random.default_rng(n).integers(4, 4096, n).astype(np.int32) for n in (30, 90, 200)]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [Request(f"{len(prompt)}", prompt, greedy, max_tokens=12, seed=0) for prompt in prompts]
    cell = run_cell(config, replace(WAYS[0], max_num_batched_tokens=64), column, requests, run_alone(config, requests))
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted == cell.num_drafts > 0


def test_same_tokens_on_two_ranks(reference: Reference) -> None:
    ranks = ParallelConfig(tensor_parallel_size=2, rank_timeout_s=60.0)
    check(replace(reference.base, parallel=ranks), WAYS[0], "ngram", reference)


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_same_tokens_with_blocks_that_went_and_came_back(
    reference: Reference, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, way = column_of(method), replace(test_swap.WAY, num_blocks=40)
    with test_swap.swapping(reference, column, way) as engine:
        requests = column.apply(reference.requests[:12])
        test_swap.check(reference, engine, requests)
        assert engine.stats().swap.num_loaded > 10
        swap = engine._scheduler._swap
        assert swap is not None
        swap._load_deadline_s = 0.0  # what has not come by then is computed, in other blocks
        take = swap._store.take_results
        monkeypatch.setattr(swap._store, "take_results", lambda: [] if swap._loads else take())
        test_swap.check(reference, engine, requests, num_passes=1)
        assert engine.stats().swap.num_late > 0


def test_a_long_prompt_that_comes_back_takes_no_more_blocks(tmp_path: pathlib.Path) -> None:
    base = configure(tmp_path)
    base = replace(base, cache=replace(base.cache, swap_space=0.05))
    with open_engine(base, replace(LONG, enable_prefix_caching=True), PLAIN) as engine:
        for first_token in (3, 1003, 3):
            assert most_blocks(engine, 900, max_tokens=20, first_token=first_token) <= MOST_BLOCKS
            test_swap.settle(engine)
        assert engine.stats().num_prefix_swap_hit_tokens > 800


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_same_tokens_with_prompts_of_another_instance(reference: Reference, method: str) -> None:
    """A transfer that is lost lacks blocks to compute its prompt in, so the request begins anew."""
    column, rng = column_of(method), random.Random(0)
    with open_pair(reference, (test_handover.DECODE, column), (test_handover.PREFILL, column), seed=1) as pair:

        def lose() -> None:
            if pair.wire.waiting and rng.random() < 0.1:
                pair.wire.lose(rng.choice(pair.wire.waiting))

        assert compare(reference.answers, pair.run(column.apply(reference.requests), rng, each_turn=lose)) is None
        assert min(pair.wire.num_whole, pair.wire.num_failed) > 0


def test_a_long_prompt_of_another_instance_takes_no_more_blocks(reference: Reference) -> None:
    prompt = np.concatenate([r.prompt_token_ids for r in reference.requests])[:400]
    template = next(r for r in reference.requests if r.sampling.temperature == 0.0)
    request = replace(template, request_id="long", prompt_token_ids=prompt, max_tokens=2, cache_salt="", grammar="")
    most = 0
    with open_pair(reference, (test_handover.DECODE, PLAIN), (test_handover.PREFILL, PLAIN), seed=1) as pair:

        def look() -> None:
            nonlocal most
            kv = pair.decode._pool.kv
            most = max(most, kv.num_blocks - kv.num_free_blocks - kv.num_cached_blocks)

        pair.run([request], random.Random(0), each_turn=look)
        assert (pair.wire.num_whole, pair.wire.num_failed) == (1, 0)
        num_pages = pair.wire.num_moved
    num_full, num_window = -(-400 // 16), -(-(WINDOW + 16) // 16) + 1
    assert num_pages <= num_full + 2 * num_window
    assert num_full <= most <= num_full + 2 * num_window


@pytest.mark.parametrize("method", ["naive", "mtp"])
def test_a_long_request_keeps_the_blocks_of_its_full_layers_and_of_its_windows(
    tmp_path: pathlib.Path, method: str
) -> None:
    with open_engine(configure(tmp_path), LONG, column_of(method)) as engine:
        assert 920 // 16 < most_blocks(engine, 900, max_tokens=20) <= MOST_BLOCKS


def test_verify_gives_every_group_its_blocks(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = configure(tmp_path).model.model
    lengths = ["--requests", "8", "--prompt-tokens", "80", "--output-tokens", "24"]
    arguments = ["--quick", "--way", "batch 7", "--methods", "ngram", *lengths]
    assert main(["verify", "--model", model, *arguments]) == 0, capsys.readouterr().out
