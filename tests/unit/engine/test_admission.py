"""What the engine takes: a request whose columns break a rule is refused on arrival, from any client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.sampling import MAX_BAD_WORD_TOKENS
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import KvSource, Request, Speculation
from tests.doubles.engines import run_to_end, toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor

VOCAB = 97


def make_engine() -> Engine:
    info = toy_info(vocab_size=VOCAB, max_model_len=64, max_draft_tokens=3)
    return Engine(toy_config(), ToyExecutor(info))


def bypassed(**values: Any) -> SamplingParams:
    """Values as only a broken frontend can have them."""
    sampling = SamplingParams(temperature=0.0)
    for name, value in values.items():
        object.__setattr__(sampling, name, value)
    return sampling


GOOD = toy_request("x", [5, 6], 4)
BAD = [
    (replace(GOOD, sampling=bypassed(top_p=1e-50)), "top_p"),
    (replace(GOOD, sampling=bypassed(temperature=float("nan"))), "temperature"),
    (replace(GOOD, sampling=bypassed(top_k=-1)), "top_k"),
    (replace(GOOD, sampling=bypassed(top_k=2**40)), "top_k"),
    (replace(GOOD, sampling=bypassed(repetition_penalty=0.0)), "repetition_penalty"),
    (replace(GOOD, sampling=bypassed(logit_bias={5: float("inf")})), "logit_bias"),
    (replace(GOOD, sampling=bypassed(logit_bias={VOCAB: 1.0})), "logit_bias"),
    (replace(GOOD, sampling=bypassed(logit_bias={2**40: 1.0})), "logit_bias"),
    (replace(GOOD, sampling=bypassed(stop_token_ids=(VOCAB,))), "stop_token_ids"),
    (replace(GOOD, sampling=bypassed(logprobs=21)), "logprobs"),
    (replace(GOOD, seed=-1), "seed"),
    (replace(GOOD, seed=2**63), "seed"),
    (replace(GOOD, max_tokens=0), "max_tokens"),
    (replace(GOOD, max_tokens=63), "max_tokens"),
    (replace(GOOD, priority=2**31), "priority"),
    (replace(GOOD, eos_token_ids=(1, VOCAB)), "eos_token_ids"),
    (replace(GOOD, grammar="start: /a/", eos_token_ids=()), "eos_token_ids"),
    (replace(GOOD, bad_words_token_ids=((5, VOCAB),)), "bad_words"),
    (replace(GOOD, bad_words_token_ids=((),)), "bad_words"),
    (replace(GOOD, bad_words_token_ids=((5,) * (MAX_BAD_WORD_TOKENS + 1),)), "bad_words"),
    (replace(GOOD, prompt_token_ids=np.array([5, VOCAB], np.int32)), "prompt_token_ids"),
    (replace(GOOD, prompt_token_ids=np.array([-1], np.int32)), "prompt_token_ids"),
    (replace(GOOD, prompt_token_ids=np.zeros(0, np.int32)), "prompt"),
    (replace(GOOD, request_id="x" * 257), "request_id"),
    (replace(GOOD, cache_salt="x" * 257), "cache_salt"),
    (replace(GOOD, output_token_ids=np.array([VOCAB], np.int32)), "output_token_ids"),
    (replace(GOOD, output_token_ids=np.full(4, 9, np.int32)), "output_token_ids"),
    (replace(GOOD, output_token_ids=np.array([9, 3], np.int32), eos_token_ids=(3,)), "output_token_ids"),
    (replace(GOOD, kv_source=KvSource("x" * 257, "tcp://h:1")), "kv_source"),
    (replace(GOOD, kv_source=KvSource("x", "t" * 257)), "kv_source"),
    (replace(GOOD, speculation=Speculation(method="mtp")), "speculation"),
    (replace(GOOD, speculation=Speculation(num_speculative_tokens=4)), "speculation"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{i}-{field}" for i, (_, field) in enumerate(BAD)])
def test_a_request_that_breaks_a_rule_is_refused(request_: Request, field: str) -> None:
    engine = make_engine()
    engine.submit(toy_request("other", [7, 8, 9], 4))
    engine.step()
    with pytest.raises(BadRequest, match=": expected ") as caught:
        engine.submit(request_)
    assert caught.value.param == field
    assert list(run_to_end(engine).last) == ["other"]


def test_a_request_at_every_limit_is_taken() -> None:
    engine = make_engine()
    request = toy_request("x" * 256, [5, VOCAB - 1], 62, cache_salt="s" * 256)
    words = tuple((i,) for i in range(2, VOCAB)) * 86
    engine.submit(replace(request, bad_words_token_ids=words[:MAX_BAD_WORD_TOKENS], priority=-(2**31)))
    assert len(run_to_end(engine).token_ids["x" * 256]) == 62


def test_a_request_without_drafts_may_name_what_nobody_has() -> None:
    engine = make_engine()
    engine.submit(replace(GOOD, speculation=Speculation(enabled=False, method="mtp", num_speculative_tokens=99)))
    assert len(run_to_end(engine).token_ids["x"]) == 4


def test_output_from_elsewhere_counts_as_its_own() -> None:
    engine = make_engine()
    given = np.array([9, 3], np.int32)
    request = replace(GOOD, max_tokens=6, output_token_ids=given, eos_token_ids=(3,), sampling=bypassed(min_tokens=5))
    engine.submit(request)  # an EOS before min_tokens ends nothing
    whole = make_engine()
    whole.submit(replace(request, prompt_token_ids=np.append(GOOD.prompt_token_ids, given), output_token_ids=given[:0]))
    rest = run_to_end(engine).token_ids["x"]
    assert len(rest) == 4
    assert rest == run_to_end(whole).token_ids["x"][:4]
