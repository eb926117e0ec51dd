"""The promise for requests that begin elsewhere: what was generated there and what is generated here are one output."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Reference, compare, quick_variants, standard_methods
from fastdeploy_sd.cli.verify.answers import Answer
from fastdeploy_sd.cli.verify.runs import open_engine, run
from fastdeploy_sd.types import Request
from tests.engine.models import References, fitted

pytestmark = pytest.mark.slow

WAYS = [
    EngineVariant("roomy", max_num_seqs=9),
    replace(quick_variants()[1], name="tight", num_requests=None, must_hit=False),
]
CELLS = [("demo", name) for name in ("naive", "ngram", "suffix", "mtp", "mtp-ngram", "auto", "auto-mtp")]
CELLS += [
    (model, "mtp-ngram")
    for model in ("deepseek_v3-tiny", "glm4_moe-tiny", "gpt_oss-tiny", "qwen3_5-tiny", "qwen3_next-tiny")
]


def resumed(reference: Reference, rng: random.Random) -> tuple[list[Request], dict[str, Answer]]:
    """Every request, cut somewhere in its output, and what is left of its answer."""
    requests, rest = [], {}
    for request in reference.requests:
        answer = reference.answers[request.request_id]
        num_given = rng.randrange(len(answer.token_ids)) or len(answer.token_ids) // 2
        given = np.array(answer.token_ids[:num_given], np.int32)
        requests.append(replace(request, output_token_ids=given))
        rest[request.request_id] = replace(
            answer,
            token_ids=answer.token_ids[num_given:],
            logprobs=answer.logprobs[num_given:],
            prompt_logprobs=() if num_given else answer.prompt_logprobs,  # the first part had them
        )
    assert sum(len(request.output_token_ids) > 0 for request in requests) > 12
    return requests, rest


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize(("model", "name"), CELLS)
def test_the_rest_of_an_output_is_the_same(references: References, model: str, name: str, way: EngineVariant) -> None:
    reference = references.get(model)
    requests, rest = resumed(reference, random.Random(f"{name} {way.name}"))
    [method] = standard_methods([name], [4], model_method="mtp")
    with open_engine(reference.base, fitted(way, model), method) as engine:
        got = run(engine, requests, arrivals_per_step=3)
        assert compare(rest, got) is None
        assert engine.stats().num_generated_tokens == sum(len(answer.token_ids) for answer in rest.values())
