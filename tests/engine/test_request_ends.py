"""The promise where requests end: at the model's length inside a block, and at an EOS with right drafts behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, Reference, quick_variants, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import run_alone
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason, Request
from tests.doubles.proposers import Continuations
from tests.engine.models import DOUBLES, DOUBLES_WITH_DRAFT_KV, References, double, double_with_draft_kv

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
# The last block reaches past it.
MAX_MODEL_LEN = 61
WAYS = [
    EngineVariant("roomy", max_num_seqs=7),
    replace(quick_variants()[1], name="tight", num_blocks=6, num_requests=None, must_hit=False),
]


def make_request(name: str, prompt_len: int, max_tokens: int, *, temperature: float = 0.0) -> Request:
    prompt = np.random.default_rng(prompt_len).integers(4, 200, prompt_len).astype(np.int32)
    return Request(name, prompt, SamplingParams(temperature=temperature), max_tokens, seed=prompt_len)


def full_requests() -> list[Request]:
    """Requests of exactly the model's length, which nothing but it ends."""
    lengths = (5, 16, 33, 44, 47, 48, 52, 55, 56, 57, 58, 59)
    return [make_request(f"r{n}", n, MAX_MODEL_LEN - n, temperature=0.5 * (n % 2)) for n in lengths]


def texts(reference: Reference) -> dict[str, Sequence[int]]:
    """Prompt and output of every request, of both passes."""
    found = {
        r.request_id: [*r.prompt_token_ids.tolist(), *reference.answers[r.request_id].token_ids]
        for r in reference.requests
    }
    return found | {f"{name}-again-1": text for name, text in found.items()}


def check(reference: Reference, method: Method) -> int:
    """Run the method in every way; returns the drafts accepted."""
    num_accepted = 0
    for way in WAYS:
        cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
        assert (cell.difference, cell.missing) == (None, None)
        assert cell.num_drafts > 0
        num_accepted += cell.num_accepted
    return num_accepted


def reference_of(references: References, model: str, requests: Sequence[Request], max_model_len: int) -> Reference:
    base = references.get(model).base
    base = replace(base, model=replace(base.model, max_model_len=max_model_len))
    return Reference(base, tuple(requests), run_alone(base, requests))


@pytest.mark.parametrize("name", [*DOUBLES, *DOUBLES_WITH_DRAFT_KV])
def test_drafts_up_to_the_models_length(references: References, name: str) -> None:
    assert MAX_MODEL_LEN % BLOCK_SIZE != 0
    reference = reference_of(references, "qwen3-tiny", full_requests(), MAX_MODEL_LEN)
    assert {a.finish_reason for a in reference.answers.values()} == {FinishReason.LENGTH}
    make = double if name in DOUBLES else double_with_draft_kv
    num_accepted = check(reference, make(name, 4, texts(reference)))
    assert (num_accepted > 0) == ("wrong" not in name)


@pytest.mark.parametrize("method", ["mtp", "mtp-ngram", "mtp-suffix"])
def test_layers_that_are_often_right_draft_up_to_the_models_length(references: References, method: str) -> None:
    reference = reference_of(references, "demo", full_requests(), MAX_MODEL_LEN)
    [column] = standard_methods([method], [4])
    assert check(reference, column) > 0


@pytest.mark.parametrize("name", ["oracle", "oracle after MTP", "random after MTP"])
def test_right_drafts_behind_an_end(references: References, name: str) -> None:
    endless = [make_request(f"r{n}", n, 24) for n in (3, 17, 30, 33)]
    known: Continuations = texts(reference_of(references, "qwen3-tiny", endless, 512))
    # Output 3 is the last one, and outputs 2 to 5 are drafted for after the first.
    ending = [replace(r, eos_token_ids=(known[r.request_id][len(r.prompt_token_ids) + 2],)) for r in endless]
    reference = reference_of(references, "qwen3-tiny", ending, 512)
    assert {a.finish_reason for a in reference.answers.values()} == {FinishReason.STOP}
    make = double if name in DOUBLES else double_with_draft_kv
    method = make(name, 4, known)
    cell = run_cell(reference.base, WAYS[0], method, reference.requests, reference.answers)
    assert cell.difference is None
    if "oracle" in name:
        assert (
            cell.num_emitted
            == cell.num_drafts
            == cell.num_accepted
            == sum(len(a.token_ids) - 1 for a in reference.answers.values())
        )
