"""SamplingParams takes what the kernels take, and refuses all else with a BadRequest that names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import MAX_SHOWN_CHARS, BadRequest, shown
from fastdeploy_sd.rules.sampling import NUMBER_RULES, SEED_LIMIT
from fastdeploy_sd.sampling_params import SamplingParams, verified

FLOATS = [name for name, rule in NUMBER_RULES.items() if rule.dtype is np.float32 and name != "logit_bias"]
INTEGERS = [n for n, rule in NUMBER_RULES.items() if rule.dtype is not np.float32 and n != "stop_token_ids"]


def refused(name: str, value: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        SamplingParams.from_dict({name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name}: expected ")
    assert len(caught.value.message) < MAX_SHOWN_CHARS + 150
    return caught.value.message


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_at_their_edges(name: str) -> None:
    rule = NUMBER_RULES[name]
    for value in (rule.low, rule.high, int(rule.high), math.nextafter(rule.low, rule.high)):
        if rule.accepts(value):
            assert getattr(SamplingParams.from_dict({name: value}), name) == value
    for value in (math.nextafter(rule.low, -math.inf), math.nextafter(rule.high, math.inf)):
        refused(name, value)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000, True, "1", [1], {}], ids=shown
)
def test_what_is_no_number_in_the_range_is_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1e-46, 7e-46, 1e-50, 5e-324])
def test_a_top_p_that_is_0_as_float32_is_refused(value: float) -> None:
    assert refused("top_p", value) == f"top_p: expected a number in (0, 1], got {value!r}"


def test_the_smallest_top_p_that_float32_holds_is_taken() -> None:
    assert SamplingParams(top_p=1e-45).top_p == 1e-45


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [10**400, -(10**5000), 10**5000, 1.0, True, "1"], ids=shown)
def test_what_is_no_integer_in_the_range_is_refused(name: str, value: Any) -> None:
    refused(name, value)


def test_seeds_and_top_k_at_their_edges() -> None:
    assert SamplingParams(seed=SEED_LIMIT - 1).seed == SEED_LIMIT - 1
    refused("seed", SEED_LIMIT)
    assert SamplingParams(top_k=-1).top_k == 0
    assert "an integer in -1..2147483647" in refused("top_k", -2)


@pytest.mark.parametrize(
    "value",
    [
        {"9" * 5000: 1},
        {10**5000: 1},
        {"5": 10**400},
        {"5": math.nan},
        {"5": 100.1},
        {"-1": 1},
        {"x": 1},
        {"5": 1, "05": 2},
        {5: 1, "5": 2},
        {True: 1},
        {1.0: 1},
        {2**31: 1},
        {str(i): 0 for i in range(1025)},
        "x" * 100_000,
        [1],
    ],
    ids=shown,
)
def test_a_wrong_bias_is_refused(value: Any) -> None:
    refused("logit_bias", value)


def test_a_bias_may_have_texts_or_integers_as_keys() -> None:
    assert SamplingParams.from_dict({"logit_bias": {"5": 1, 7: -2.5, "008": 0}}).logit_bias == {5: 1.0, 7: -2.5, 8: 0.0}


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize("value", [["", "x" * 250_000], [1], 5, ["a", None], ["a"] * 300, {"a": "b"}])
def test_wrong_texts_are_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("value", ["5", 5, [5.0], [True], [-1], [2**31], [10**5000], [1] * 257], ids=shown)
def test_wrong_stop_token_ids_are_refused(value: Any) -> None:
    refused("stop_token_ids", value)


def test_a_wrong_answer_is_short_whatever_was_sent() -> None:
    huge: Sequence[Any] = ["x" * 1_000_000] * 1000
    for name in (*FLOATS, *INTEGERS, "stop_token_ids", "logit_bias", "ignore_eos"):
        refused(name, huge)


@pytest.mark.parametrize("name", [parameter.name for parameter in fields(SamplingParams)])
def test_every_parameter_is_checked(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: expected"):
        verified(name, object())
    assert SamplingParams.from_dict({name: getattr(SamplingParams(), name)}) == SamplingParams()
