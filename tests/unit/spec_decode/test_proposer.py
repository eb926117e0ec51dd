from __future__ import annotations

import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.spec_decode.proposer import ProposerContext

CONTEXT = ProposerContext(max_num_seqs=4, max_model_len=8, vocab_size=100)


def test_an_unknown_method_is_named_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"method: expected one of .*naive.*, got 'niave' \(did you mean 'naive'\?\)"):
        create_proposer(SpeculativeConfig(method="niave"), CONTEXT)
