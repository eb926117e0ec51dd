"""Prefix hits of a model with recurrent states: the same bytes with and without, and as many whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, make_reference, run_cell, standard_methods
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.types import Request
from fastdeploy_sd.types.stats import EngineStats
from fastdeploy_sd.worker.executor import create_executor
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer
from tests.engine.test_swap import settle
from tests.models.mtp_models import make_model

pytestmark = pytest.mark.slow

VOCAB, NUM_TOKENS, NUM_FILLERS = 4096, 40, 3
PLAIN = Method("naive", SpeculativeConfig(method="naive"), create_proposer)
DOUBLES = {"oracle": OracleProposer, "wrong": WrongProposer, "random": RandomLengthProposer}
# Of the texts of `serve`: a conversation, then three prompts that share 52 tokens, and the end of the first again.
HITS = [0, 80, 128, 0, 0, 48, 80]


@dataclass(frozen=True)
class Served:
    """What became of each text; `hits`: how much of the prompt was reused."""

    hits: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    stats: EngineStats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One with a random MTP layer."""
    return str(make_model(tmp_path_factory.mktemp("model"), "qwen3_5-tiny", "qwen").path)


def configure(model: str, num_snapshots: int | None = None, *, enable_prefix_caching: bool = True) -> Config:
    cache = CacheConfig(
        block_size=16,
        num_blocks=64,
        num_state_snapshots=num_snapshots,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return Config(ModelConfig(model=model, dtype="bfloat16"), cache, scheduler)


def serve(config: Config, method: Method = PLAIN, between: Callable[[Engine], object] = lambda _: None) -> Served:
    """Run a conversation and other texts, one after the other; `between`: what happens after each."""
    executor = create_executor(replace(config, speculative=method.speculative), method.make_proposer)
    engine, rng = Engine(config, executor), np.random.default_rng(1)
    hits, prompts, answers = list[int](), list[list[int]](), list[list[int]]()

    def run(prompt: Sequence[int], temperature: float = 0.0) -> list[int]:
        sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.submit(Request(f"r{len(hits)}", np.array(prompt, np.int32), sampling, max_tokens=NUM_TOKENS, seed=5))
        hits.append(0)
        prompts.append(list(prompt))
        answers.append([])
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                answers[-1] += output.token_ids
                hits[-1] = max(hits[-1], output.num_cached_tokens)
            engine.check_integrity()
        between(engine)
        return answers[-1]

    def words(count: int) -> list[int]:
        found: list[int] = rng.integers(4, VOCAB, count).tolist()
        return found

    first = words(44)
    second = [*first, *run(first), *words(7)]
    run([*second, *run(second, 1.0), *words(30)])
    stem = words(52)
    for _ in range(3):
        run([*stem, *words(20)])
    run(second[:90], 1.0)
    stats = engine.stats()
    executor.shutdown()
    return Served(hits, prompts, answers, stats)


@pytest.fixture(scope="module")
def plain(model: str) -> Served:
    """Without reuse of prefixes, and without drafts."""
    return serve(configure(model, enable_prefix_caching=False))


def method_of(name: str, plain: Served) -> Method:
    if name not in DOUBLES:
        return PLAIN if name == "naive" else standard_methods([name], [4])[0]
    texts = zip(plain.prompts, plain.answers, strict=True)
    known = {f"r{i}": [*prompt, *answer] for i, (prompt, answer) in enumerate(texts)}
    known |= {f"filler {i}": [] for i in range(NUM_FILLERS)}
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=7)
    return Method(name, drafts, lambda *_: DOUBLES[name](known, VOCAB))


@pytest.mark.parametrize("name", ["naive", "ngram", "auto", "mtp", *DOUBLES])
def test_drafts_cost_no_hit_and_hits_change_no_byte(name: str, model: str, plain: Served) -> None:
    served = serve(configure(model), method_of(name, plain))
    assert plain.hits == [0] * len(HITS)
    assert served.hits == HITS
    assert served.answers == plain.answers
    assert served.stats.num_prefix_lost_tokens == 0
    assert served.stats.num_accepted_tokens >= {"oracle": 150, "random": 30}.get(name, 0)
    assert served.stats.num_draft_tokens >= {"wrong": 150, "random": 30, "mtp": 30}.get(name, 0)
    assert 0 < served.stats.num_used_state_snapshots <= served.stats.num_state_snapshots


@pytest.mark.parametrize("num_snapshots", [0, 1, 2])
@pytest.mark.parametrize("name", ["naive", "random"])
def test_few_snapshots_cost_hits_and_change_no_byte(name: str, num_snapshots: int, model: str, plain: Served) -> None:
    served = serve(configure(model, num_snapshots), method_of(name, plain))
    assert served.answers == plain.answers
    assert served.stats.num_state_snapshots == num_snapshots
    assert sum(served.hits) < sum(HITS)


def push_out(engine: Engine) -> None:
    """Fill blocks and snapshots with what shares nothing with any text."""
    settle(engine)
    for i in range(NUM_FILLERS):
        prompt = np.random.default_rng([engine.stats().num_steps, i]).integers(4, VOCAB, 240).astype(np.int32)
        engine.submit(Request(f"filler {i}", prompt, SamplingParams(max_tokens=1), max_tokens=1, seed=0))
        while engine.has_work():
            engine.step()
    settle(engine)


@pytest.mark.parametrize("name", ["naive", "ngram", "mtp", *DOUBLES])
def test_all_hits_come_back_from_the_second_level(name: str, model: str, plain: Served) -> None:
    config = configure(model, 4)
    config = replace(config, cache=replace(config.cache, num_blocks=20, swap_space=0.05))
    served = serve(config, method_of(name, plain), push_out)
    assert served.hits == HITS
    assert served.answers == plain.answers
    assert served.stats.num_prefix_swap_hit_tokens == sum(HITS)
    assert served.stats.num_prefix_hit_tokens == 0


def test_a_second_level_without_room_for_a_state_is_refused(model: str) -> None:
    config = configure(model)
    with pytest.raises(ConfigError, match=r"swap_space: expected at least .* \(one block and one state\), got 5e-05"):
        create_executor(replace(config, cache=replace(config.cache, swap_space=5e-5)))


WAYS = [
    EngineVariant("prefix cache", 4, 64, enable_prefix_caching=True, num_passes=2, must_hit=True, arrivals_per_step=1),
    EngineVariant(
        "preemption, chunks, prefix cache", max_num_seqs=8, num_blocks=34, max_num_batched_tokens=24,
        long_prefill_token_threshold=7, enable_prefix_caching=True, num_passes=2, must_preempt=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("name", ["naive", "ngram", "auto", "mtp"])
def test_same_tokens_when_requests_share_states(way: EngineVariant, name: str, model: str) -> None:
    base = Config(ModelConfig(model=model, dtype="bfloat16"))
    reference = make_reference(base, seed=3, count=16)
    method = PLAIN if name == "naive" else standard_methods([name], [4])[0]
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
