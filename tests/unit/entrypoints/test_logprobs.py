"""Log-probabilities in JSON: always numbers that JSON has."""

from __future__ import annotations

import json
import math

import pytest

from fastdeploy_sd.entrypoints.openai.logprobs import LogprobsFormat
from fastdeploy_sd.types import TokenLogprob
from tests.unit.text.vocabularies import golden_tokenizer


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1e30, -0.5, 0.0])
def test_whatever_a_model_makes_of_a_token_is_a_number(value: float) -> None:
    form, entry = LogprobsFormat(golden_tokenizer()), TokenLogprob(5, value, 1, (5, 6), (value, value))
    told = form.completion([entry], [0]), form.chat([entry])
    assert len(json.loads(json.dumps(told, allow_nan=False))) == 2
    finite = -9999.0 if math.isnan(value) else max(value, -9999.0)
    assert set(told[0]["top_logprobs"][0].values()) == {finite}
    assert told[1]["content"][0]["logprob"] == finite


def test_tokens_may_be_named_by_their_ids() -> None:
    entry = TokenLogprob(7, -1.0, 2, (5, 6), (-0.5, -0.75))
    form = LogprobsFormat(golden_tokenizer(), names_ids=True)
    told = form.completion([entry], [0])
    assert told["tokens"] == ["token_id:7"]
    assert told["top_logprobs"] == [{"token_id:5": -0.5, "token_id:6": -0.75, "token_id:7": -1.0}]
    [shown], [plain] = form.chat([entry])["content"], LogprobsFormat(golden_tokenizer()).chat([entry])["content"]
    assert [shown["token"], *(other["token"] for other in shown["top_logprobs"])] == [
        f"token_id:{i}" for i in (7, 5, 6)
    ]
    assert shown["bytes"] == plain["bytes"], "they are the text's"
