"""What error texts repeat of a value that was sent, and which name they suggest."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fastdeploy_sd.errors import MAX_SHOWN_CHARS, shown, suggest


@pytest.mark.parametrize("value", [0, -1.5, "x", "it's", [], [1, "a"], {}, {"a": [1]}, (1,), 10**150, float("nan")])
def test_short_values_are_shown_as_they_are(value: object) -> None:
    assert shown(value) == repr(value)


def test_words_are_those_of_json() -> None:
    assert shown([True, {"a": None}, False]) == "[true, {'a': null}, false]"


@pytest.mark.parametrize(
    "value",
    [
        "x" * (1 << 24),
        ["x" * 100_000] * 100_000,
        {str(i): i for i in range(300_000)},
        [[[[1] * 1000] * 1000] * 1000] * 1000,
        10**400,
        -(10**50_000),
        [10**50_000],
        {10**5000: 10**5000},
        "\udc80" * 1000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_large_values_are_cut_and_cost_little(value: Any) -> None:
    begin = time.process_time()
    text = shown(value)
    assert time.process_time() - begin < 0.5
    assert 0 < len(text) <= MAX_SHOWN_CHARS
    text.encode()


def test_a_huge_integer_is_named_by_its_size() -> None:
    assert shown(10**5000) == "<an integer of 16610 bits>"


def test_a_nest_without_a_bottom_ends() -> None:
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    assert shown(nest) == "[[[[...]]]]"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("prot", "port"),
        ("fp4", "fp8"),
        ("mtpp", "mtp"),
        ("top_p", "topp"),
        ("server", "serve"),
        ("max_ngram", "max_ngram_size"),
        ("max_seqs", "max_num_seqs"),
        ("data_parallel_sise", "data_parallel_size"),
        ("speculatve_confg", "speculative_config"),
    ],
)
def test_a_slip_or_a_missing_word_gets_a_suggestion(name: str, known: str) -> None:
    assert suggest(name, ["other", known]) == f" (did you mean '{known}'?)"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("lora_modules", "logprobs_mode"),
        ("kv_transfer_config", "rsync_config"),
        ("enable_sleep_mode", "enable_chunked_moe"),
        ("enable_lora", "enable_logprob"),
        ("chat_template_kwargs", "chat_template"),
        ("reasoning_config", "rsync_config"),
        ("version", "verify"),
    ],
)
def test_a_name_that_only_shares_words_gets_none(name: str, known: str) -> None:
    assert suggest(name, [known]) == ""
