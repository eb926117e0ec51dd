"""Log-probabilities of prompt tokens: the bits of those that the same tokens have as output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, open_engine
from fastdeploy_sd.cli.verify.answers import AnswerCollector
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.device import step_memory
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason, Request
from tests.engine.models import References

pytestmark = pytest.mark.slow

NUM_TOP = 3
ROOMY = EngineVariant("roomy", max_num_seqs=4)
CHUNKS = EngineVariant(
    "chunks, prefix cache", max_num_seqs=2, max_num_batched_tokens=13, block_size=16, enable_prefix_caching=True
)


def ask(name: str, token_ids: list[int], max_tokens: int, **sampling: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return Request(name, np.array(token_ids, np.int32), params, max_tokens=max(max_tokens, 1), seed=1)


@pytest.mark.parametrize("way", [ROOMY, CHUNKS], ids=lambda way: way.name)
def test_they_are_those_of_the_same_tokens_as_output(
    references: References, way: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of few rows, after a prefix that the cache has, and with others."""
    monkeypatch.setattr(step_memory, "_MAX_PROMPT_LOGITS_BYTES", 1)
    prompt = list(range(20, 57))
    with open_engine(references.base("qwen3-tiny"), way, PLAIN) as engine:
        [written] = run(engine, [ask("written", prompt, 24, logprobs=NUM_TOP)]).values()
        assert len(written.token_ids) == 24
        whole = [*prompt, *written.token_ids]
        requests = [
            ask("first", whole, 0, prompt_logprobs=NUM_TOP),
            ask("again", whole, 2, prompt_logprobs=NUM_TOP, logprobs=0),
            ask("other", prompt[::-1], 3),
            ask("short", [7], 1, prompt_logprobs=1),
        ]
        got = run(engine, requests, arrivals_per_step=1)
        num_hits = engine.stats().num_prefix_hit_tokens
        run(engine, [ask("hit", whole, 1)])
        assert (engine.stats().num_prefix_hit_tokens > num_hits) == way.enable_prefix_caching, "its blocks are there"
    entries = tuple(replace(entry, token_id=0) for entry in written.logprobs)
    assert got["first"].prompt_logprobs[-24:] == entries
    assert len(got["first"].prompt_logprobs) == len(whole) - 1
    assert got["again"].prompt_logprobs == got["first"].prompt_logprobs
    assert (got["first"].token_ids, got["first"].finish_reason) == ((), FinishReason.LENGTH)
    assert len(got["again"].token_ids) == len(got["again"].logprobs) == 2
    assert got["other"].prompt_logprobs == got["short"].prompt_logprobs == ()


def test_they_are_told_once_and_no_prompt_is_taken_from_the_cache(references: References) -> None:
    prompt = [5, 9, 4] * 30
    with open_engine(references.base("qwen3-tiny"), CHUNKS, PLAIN) as engine:
        collector = AnswerCollector()
        for name in ("a", "b"):
            engine.submit(ask(name, prompt, 3, prompt_logprobs=0))
            outputs = []
            while engine.has_work():
                outputs += engine.step()
            for output in outputs:
                collector.add(output)
            assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]
            assert all(output.num_cached_tokens == 0 for output in outputs)
    assert collector.answer("a") == collector.answer("b")
