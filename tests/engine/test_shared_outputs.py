"""What suffix decoding keeps of a request is its output: nothing that was accepted behind the token that ended it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.router import MethodRouter
from fastdeploy_sd.spec_decode.suffix import SuffixProposer
from tests.models import golden
from tests.models.mtp_runs import make_engine, make_requests, run

MODEL = str(golden.ROOT / "qwen3-tiny")
PROMPT = np.arange(4, 24, dtype=np.int32)
NUM_TOKENS = 24


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_a_repeated_request_shares_its_output_alone(min_tokens: int) -> None:
    plain, _ = make_engine(MODEL, 0, method="naive")
    output = run(plain, make_requests([PROMPT], NUM_TOKENS))["r0"][len(PROMPT) :]
    stop = next(
        i for i in range(max(min_tokens, 1) + 4, NUM_TOKENS) if output[i] not in output[max(min_tokens - 1, 0) : i]
    )
    engine, recorder = make_engine(MODEL, 5, method="suffix")
    assert isinstance(recorder.proposer, DraftGuard)
    assert isinstance(recorder.proposer.method, MethodRouter)
    guards = [made for made in recorder.proposer.method._made.values() if isinstance(made, DraftGuard)]
    (suffix,) = (guard.method for guard in guards if isinstance(guard.method, SuffixProposer))
    first, *_ = make_requests([PROMPT], NUM_TOKENS, stop_token_ids=(output[stop],), min_tokens=min_tokens)
    outputs = [run(engine, [replace(first, request_id=f"r{i}")])[f"r{i}"][len(PROMPT) :] for i in range(3)]
    assert [len(tokens) for tokens in outputs] == [stop + 1] * 3
    assert suffix.stats().num_tokens == 3 * (stop + 1)
    assert max(len(event.drafts) for event in recorder.events) > 2
