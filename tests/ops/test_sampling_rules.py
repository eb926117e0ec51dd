"""The kernels take exactly the values that the table of rules takes: driven to both sides of every edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.ops import sampling as native
from fastdeploy_sd.rules.sampling import NUMBER_RULES, NumberRule, verify_token_ids
from tests.ops.sampling_arrays import bias_columns, build_sampling_arrays

VOCAB = 10
LOGITS = np.linspace(-1, 1, VOCAB, dtype=np.float32)[None]
# Rule -> the kernels' columns that show a value of it.
COLUMNS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "temperature": lambda value: {"temperature": value},
    "top_p": lambda value: {"top_p": value},
    "top_k": lambda value: {"top_k": value},
    "min_p": lambda value: {"min_p": value},
    "repetition_penalty": lambda value: {"repetition_penalty": value, **_counted()},
    "presence_penalty": lambda value: {"presence_penalty": value, **_counted()},
    "frequency_penalty": lambda value: {"frequency_penalty": value, **_counted()},
    "logit_bias": lambda value: bias_columns([{3: value}]),
    "seed": lambda value: {"seed": value},
}
# Read by the engine only, or handed to a kernel as a size.
NOT_SEEN = {"n", "min_tokens", "max_tokens", "stop_token_ids", "logprobs", "prompt_logprobs"}


def _counted() -> dict[str, Any]:
    return {"count_rows": 0, "token_counts": np.ones((1, VOCAB))}


def _edges(rule: NumberRule) -> Iterator[tuple[Any, bool]]:
    """Values of the column's type at and beyond the edges, and whether the rule takes them."""
    low, high = rule.dtype(rule.low), rule.dtype(rule.high)
    if rule.dtype is np.float32:
        up, down = np.float32(np.inf), np.float32(-np.inf)
        yield from ((low, not rule.is_low_open), (high, True), (np.nextafter(low, up), True))
        yield from ((np.nextafter(low, down), False), (np.nextafter(high, up), False))
        yield from ((np.float32(special), False) for special in ("nan", "inf", "-inf"))
    else:
        yield from ((low, True), (high, True))
        if rule.dtype is np.int32:
            yield low - 1, False


CASES = [(name, value, is_taken) for name in COLUMNS for value, is_taken in _edges(NUMBER_RULES[name])]


def test_every_rule_is_driven_or_not_seen() -> None:
    assert COLUMNS.keys() | NOT_SEEN == NUMBER_RULES.keys()


@pytest.mark.parametrize(("name", "value", "is_taken"), CASES, ids=[f"{name}={value!r}" for name, value, _ in CASES])
def test_kernels_and_rules_agree(name: str, value: Any, is_taken: bool) -> None:
    sampling = build_sampling_arrays(1, 1, vocab=VOCAB, **COLUMNS[name](value))
    assert NUMBER_RULES[name].accepts(value.item()) == is_taken
    rows, positions = np.zeros(1, np.int32), np.array([5], np.int32)
    if is_taken:
        assert 0 <= native.sample(LOGITS, rows, positions, sampling)[0] < VOCAB
        assert 0 <= native.top_p_candidates(LOGITS, rows, positions, sampling, 2)[0][0] < VOCAB
        return
    column = "bias_values" if name == "logit_bias" else name
    with pytest.raises(ValueError, match=f"{column}: expected"):
        native.sample(LOGITS, rows, positions, sampling)
    with pytest.raises(ValueError, match=f"{column}: expected"):
        native.top_p_candidates(LOGITS, rows, positions, sampling, 2)


@pytest.mark.parametrize("token_id", [-1, 0, VOCAB - 1, VOCAB])
@pytest.mark.parametrize("column", ["bias_token_ids", "mask_token_ids"])
def test_kernels_and_rules_agree_about_the_vocabulary(column: str, token_id: int) -> None:
    columns: dict[str, dict[str, Any]] = {
        "bias_token_ids": bias_columns([{token_id: 1.0}]),
        "mask_token_ids": {"cu_mask": [0, 1], "mask_token_ids": [token_id]},
    }
    sampling = build_sampling_arrays(1, 1, vocab=VOCAB, **columns[column])
    is_taken = 0 <= token_id < VOCAB
    with nullcontext() if is_taken else pytest.raises(ValueError, match=f"{column}: expected ids of the vocabulary"):
        native.sample(LOGITS, np.zeros(1, np.int32), np.ones(1, np.int32), sampling)
    with nullcontext() if is_taken else pytest.raises(BadRequest, match="the vocabulary"):
        verify_token_ids("ids", [token_id], VOCAB)
