from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext, create_proposer

CONTEXT = ProposerContext(max_num_seqs=4, max_model_len=8, vocab_size=100)


def test_naive_proposes_nothing() -> None:
    proposer = create_proposer(SpeculativeConfig(method="naive"), CONTEXT)
    assert proposer.num_lookahead_slots == 0
    proposer.begin([DraftRequest("a", 0, 1, 1), DraftRequest("b", 1, 1, 1)])
    table = np.array([[1, 4, 0], [2, 5, 0]], np.int32)
    two = np.array([2, 2], np.int32)
    drafts = proposer.propose(ProposeInput(("a", "b"), np.array([0, 1], np.int32), table, two, two))
    assert drafts.token_ids.size == 0
    assert drafts.cu_num_draft.tolist() == [0, 0, 0]
    proposer.forget(np.array([0, 3], np.int32))
    proposer.close()


def test_an_unknown_method_is_named_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"method: expected one of .*naive.*, got 'niave' \(did you mean 'naive'\?\)"):
        create_proposer(SpeculativeConfig(method="niave"), CONTEXT)
