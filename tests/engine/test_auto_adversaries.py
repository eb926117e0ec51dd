"""Method auto over a real engine with drafters that are right, wrong, sure of what is wrong, or turn in the middle.

The drafters are the real ones; the texts make them so. A bias confines a text to a few tokens: to one, and every draft
is right; to many at a high temperature, and what followed the same tokens before says nothing, although `suffix` gives
what it has seen once and always a probability of 1. A penalty on frequency turns the one into the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Request
from fastdeploy_sd.worker.executor import create_executor

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_DRAFTS = 400, 16
# What a draft is taken to cost of a step where nothing was measured, as here.
COST = 0.1
CONFIG = Config(
    ModelConfig("demo", max_model_len=1024),
    cache=CacheConfig(num_blocks=64),
    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=256),
    speculative=SpeculativeConfig("auto", NUM_DRAFTS),
)
FIXED, *OTHERS = range(300, 364)


@pytest.fixture
def engine() -> Iterator[Engine]:
    executor = create_executor(CONFIG)
    try:
        yield Engine(CONFIG, executor)
    finally:
        executor.shutdown()


def request(name: str, bias: dict[int, float], frequency_penalty: float = 0.0) -> Request:
    rng = np.random.default_rng(len(name))
    sampling = SamplingParams(
        temperature=5.0, ignore_eos=True, max_tokens=NUM_TOKENS, logit_bias=bias, frequency_penalty=frequency_penalty
    )
    prompt = np.full(64, FIXED, np.int32) if FIXED in bias else rng.choice(OTHERS, 64).astype(np.int32)
    return Request(name, prompt, sampling, NUM_TOKENS, seed=len(name), cache_salt=name)


def run(engine: Engine, asked: Request) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """i64[steps, 3]: tokens, drafts that were verified, and of these the wrong ones, of each step."""
    engine.submit(asked)
    counts = []
    while engine.has_work():
        before = engine.stats()
        num_tokens = sum(len(output.token_ids) for output in engine.step())
        after = engine.stats()
        num_drafted, num_accepted = (
            sum(sum(getattr(c, kind)) for c in after.drafts.values())
            - sum(sum(getattr(c, kind)) for c in before.drafts.values())
            for kind in ("drafted", "accepted")
        )
        counts.append((num_tokens, num_drafted, num_drafted - num_accepted))
    found = np.array(counts, np.int64)
    assert found[:, 0].sum() == NUM_TOKENS
    return found


ONE = {FIXED: 100.0}
MANY = dict.fromkeys(OTHERS, 100.0)


def test_one_that_is_always_right_is_believed_at_once(engine: Engine) -> None:
    found = run(engine, request("right", ONE))
    assert len(found) < NUM_TOKENS / 8
    assert found[:, 2].sum() == 0


def test_one_that_is_always_wrong_is_found_out(engine: Engine) -> None:
    found = run(engine, request("wrong", MANY))
    _verify_loss(found)


def test_one_that_turns_from_a_request_to_the_next(engine: Engine) -> None:
    for round_ in range(2):
        run(engine, request(f"right {round_}", ONE))
    _verify_loss(run(engine, request("wrong", MANY)))
    assert len(run(engine, request("right again", ONE))) < NUM_TOKENS / 8


def test_one_that_turns_in_the_middle_of_a_text(engine: Engine) -> None:
    found = run(engine, request("turns", ONE | dict.fromkeys(OTHERS, 40.0), frequency_penalty=0.5))
    turn = int(np.flatnonzero(found[:, 2])[0])
    assert turn < 20
    # Without the step of the turn, which had right drafts as well.
    assert 40 < found[:turn, 0].sum() < NUM_TOKENS / 2
    _verify_loss(found[turn:])


def _verify_loss(found: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
    """What wrong drafts cost: less than ten steps within the first hundred, and then hardly anything."""
    assert found[:100, 2].sum() * COST < 10
    assert found[100:, 2].sum() * COST < 0.05 * len(found[100:])
