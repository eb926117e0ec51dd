from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.proposer import ProposeInput, ProposerNeeds, create_proposer
from fastdeploy_sd.types import VerifyResult


def test_naive_proposes_nothing_and_needs_nothing() -> None:
    proposer = create_proposer(SpeculativeConfig(method="naive", num_speculative_tokens=3))
    assert proposer.needs == ProposerNeeds()
    verified = VerifyResult(np.array([4, 5], np.int32), np.array([0, 1, 2], np.int32), np.zeros(2, np.int32))
    tokens = [np.array([1, 4], np.int32), np.array([2, 5], np.int32)]
    drafts = proposer.propose(ProposeInput(("a", "b"), tokens, np.array([3, 3], np.int32), verified))
    assert drafts.token_ids.size == 0
    assert drafts.cu_num_draft.tolist() == [0, 0, 0]
    proposer.forget(["a", "unknown"])


def test_an_unknown_method_is_named_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"method: expected one of naive, got 'niave' \(did you mean 'naive'\?\)"):
        create_proposer(SpeculativeConfig(method="niave"))
