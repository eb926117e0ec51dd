"""Log-probabilities in JSON: always numbers that JSON has."""

from __future__ import annotations

import json
import math

import pytest

from fastdeploy_sd.entrypoints.openai import logprobs
from fastdeploy_sd.types import TokenLogprob
from tests.unit.entrypoints.vocabularies import golden_tokenizer


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1e30, -0.5, 0.0])
def test_whatever_a_model_makes_of_a_token_is_a_number(value: float) -> None:
    labelled = logprobs._alternatives(golden_tokenizer(), TokenLogprob(5, value, 1, (5, 6), (value, value)))
    text = json.dumps([labelled, logprobs._chat_entry(golden_tokenizer(), 5, value)], allow_nan=False)
    assert len(json.loads(text)) == 2
    assert set(labelled.values()) == {-9999.0 if math.isnan(value) else max(value, -9999.0)}
