"""What suffix decoding keeps of a request is its output: nothing that was accepted behind the token that ended it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.methods.suffix import SuffixProposer
from fastdeploy_sd.spec_decode.proposer import ProposerContext
from tests.models import golden
from tests.models.mtp_runs import make_engine, make_requests, run

pytestmark = pytest.mark.slow

MODEL = str(golden.ROOT / "qwen3-tiny")
PROMPT = np.arange(4, 24, dtype=np.int32)
NUM_TOKENS = 24


def num_kept_tokens(file: Path) -> int:
    """How many tokens the next server that is given the file begins with."""
    config = SpeculativeConfig(method="suffix", suffix_decoding_cache_file=str(file))
    proposer = create_method("suffix", config, ProposerContext(1, 64, 4096))
    assert isinstance(proposer, SuffixProposer)
    return proposer.stats().num_tokens


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_a_repeated_request_shares_its_output_alone(min_tokens: int, tmp_path: Path) -> None:
    plain, _ = make_engine(MODEL, 0, method="naive")
    output = run(plain, make_requests([PROMPT], NUM_TOKENS))["r0"][len(PROMPT) :]
    first_possible = max(min_tokens - 1, 0)
    ends = [i for i in range(first_possible + 5, NUM_TOKENS) if output[i] not in output[first_possible:i]]
    assert ends, output
    engine, recorder = make_engine(MODEL, 5, method="suffix", suffix_decoding_cache_file=str(tmp_path / "outputs"))
    first, *_ = make_requests([PROMPT], NUM_TOKENS, stop_token_ids=(output[ends[0]],), min_tokens=min_tokens)
    outputs = [run(engine, [replace(first, request_id=f"r{i}")])[f"r{i}"][len(PROMPT) :] for i in range(3)]
    assert [len(tokens) for tokens in outputs] == [ends[0] + 1] * 3
    assert max(len(event.drafts) for event in recorder.events) > 2
    recorder.close()
    num_seen = min(len(PROMPT), SpeculativeConfig().suffix_decoding_max_tree_depth)  # of each prompt
    assert num_kept_tokens(tmp_path / "outputs") == 3 * (num_seen + ends[0] + 1)
