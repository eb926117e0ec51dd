"""speculative_config: the values of each key and the rules between keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from fastdeploy_sd.config import Config, SpeculativeConfig, config_from_kwargs
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS
from fastdeploy_sd.config.speculative_scopes import scope_of
from fastdeploy_sd.errors import ConfigError, shown
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE
from tests.unit.config.speculative_maps import read, refusal

Keys = Mapping[str, object]


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens: expected an integer of at least 0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens: expected an integer of at least 0"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens: expected an integer of at least 0"),
        ({"mtp_strategy": "with_ngran"}, "mtp_strategy: expected one of default, with_ngram, with_suffix"),
        ({"num_model_steps": 0}, "num_model_steps: expected an integer of at least 1"),
        ({"draft_p_min": -0.1}, "draft_p_min: expected a number in 0..1"),
        ({"draft_p_min": 1.5}, "draft_p_min: expected a number in 0..1"),
        ({"draft_p_min": "high"}, "draft_p_min: expected a number in 0..1"),
        ({"model": ""}, "model: expected a non-empty string, or none"),
        ({"quantization": "fp8"}, "quantization: expected one of none, wint8, wint4, or null"),
        ({"draft_head_quantization": "none"}, "draft_head_quantization: expected one of auto, target, wint8, wint4"),
        ({"max_ngram_size": 65}, "max_ngram_size: expected an integer in 1..64"),
        ({"min_ngram_size": 0}, "min_ngram_size: expected an integer in 1..64"),
        ({"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth: expected an integer in 2..4096"),
        ({"suffix_decoding_max_tree_depth": 4097}, "suffix_decoding_max_tree_depth: expected an integer in 2..4096"),
        (
            {"suffix_decoding_max_cached_requests": -2},
            "suffix_decoding_max_cached_requests: expected an integer of at least -1",
        ),
        ({"suffix_decoding_max_cache_mb": 0}, "suffix_decoding_max_cache_mb: expected an integer in 1..1048576"),
        (
            {"suffix_decoding_max_cache_mb": (1 << 20) + 1},
            "suffix_decoding_max_cache_mb: expected an integer in 1..1048576",
        ),
        (
            {"suffix_decoding_max_spec_factor": 0},
            "suffix_decoding_max_spec_factor: expected a number of at least 0.001",
        ),
        ({"suffix_decoding_min_token_prob": -0.1}, "suffix_decoding_min_token_prob: expected a number in 0..1"),
        ({"suffix_decoding_min_token_prob": 1.1}, "suffix_decoding_min_token_prob: expected a number in 0..1"),
        ({"suffix_decoding_cache_file": ""}, "suffix_decoding_cache_file: expected a non-empty string, or none"),
        ({"verify_strategy": "top_p"}, "verify_strategy: expected one of target_match, greedy, topp"),
        ({"accept_policy": "accept"}, "accept_policy: expected one of normal, accept_all, reject_all"),
        ({"max_candidate_len": 0}, "max_candidate_len: expected an integer in 1..64"),
        ({"max_candidate_len": 65}, "max_candidate_len: expected an integer in 1..64"),
        ({"verify_window": -1}, "verify_window: expected an integer in 0..64"),
        ({"verify_window": 65}, "verify_window: expected an integer in 0..64"),
        ({"benchmark_mode": 2}, "benchmark_mode: expected true or false"),
        ({"enable_draft_logprob": "maybe"}, "enable_draft_logprob: expected true or false"),
    ],
)
def test_values_have_types_and_limits(keys: Keys, expected: str) -> None:
    value = next(iter(keys.values()))
    assert refusal({"method": "mtp", **keys}).startswith(f".{expected}, got {shown(value)}")


def test_a_wrong_choice_gets_a_suggestion() -> None:
    assert refusal({"method": "mtp", "verify_strategy": "top_p"}).endswith("got 'top_p' (did you mean 'topp'?)")


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ngram", {"num_speculative_tokens": 63, "max_ngram_size": 64, "min_ngram_size": 1}),
        ("ngram", {"max_ngram_size": 3, "min_ngram_size": 3}),
        ("ngram", {"verify_strategy": "topp", "max_candidate_len": 64, "verify_window": 0}),
        ("suffix", {"suffix_decoding_max_tree_depth": 2, "suffix_decoding_max_cached_requests": -1}),
        ("suffix", {"suffix_decoding_max_tree_depth": 4096, "suffix_decoding_max_cached_requests": 0}),
        ("suffix", {"suffix_decoding_max_cache_mb": 1, "suffix_decoding_max_spec_factor": 0.001}),
        ("suffix", {"suffix_decoding_max_cache_mb": 1 << 20}),
        ("suffix", {"suffix_decoding_min_token_prob": 0.0, "suffix_decoding_cache_file": "cache.bin"}),
        ("suffix", {"suffix_decoding_min_token_prob": 1.0, "accept_policy": "accept_all"}),
        ("mtp", {"mtp_strategy": "with_ngram", "num_speculative_tokens": 4, "max_ngram_size": 7}),
        ("mtp", {"model": "weights", "quantization": "wint4", "enable_draft_logprob": True}),
        ("mtp", {"draft_head_quantization": "wint8"}),
        ("mtp", {"draft_p_min": 0.75}),
        ("mtp", {"draft_p_min": 1.0}),
        ("mtp", {"verify_strategy": "greedy", "accept_policy": "reject_all"}),
    ],
)
def test_values_at_their_limits_are_kept(method: str, keys: Keys) -> None:
    config = read(method=method, **keys)
    assert {key: getattr(config, key) for key in keys} == keys


def test_quantization_none_is_not_the_absence_of_one() -> None:
    assert read(method="mtp", quantization="none").quantization == "none"
    assert read(method="mtp", quantization=None).quantization is None


def test_a_section_checks_its_fields_when_constructed() -> None:
    with pytest.raises(
        ConfigError, match=r"speculative_config\.max_ngram_size: expected an integer in 1\.\.64, got 65"
    ):
        SpeculativeConfig("ngram", 1, max_ngram_size=65)


# ---- rules between keys ---------------------------------------------------------------------------------------------


def either(names: Sequence[str]) -> str:
    return f"method {', '.join(names[:-1])} or {names[-1]}"


MODEL = either([name for name, method in METHODS.items() if method.needs_model])
LAYERS = f"{MODEL}, or auto with auto_with_mtp or auto_with_draft_model"
DRAFTING = either([name for name in METHODS if name != NAIVE])


@pytest.mark.parametrize(
    ("method", "keys", "where"),
    [
        ("naive", {"verify_strategy": "greedy"}, DRAFTING),
        ("naive", {"accept_policy": "accept_all"}, DRAFTING),
        ("naive", {"benchmark_mode": True}, DRAFTING),
        ("naive", {"max_ngram_size": 4}, DRAFTING),
        ("naive", {"suffix_decoding_cache_file": "f"}, DRAFTING),
        ("naive", {"model": "weights"}, LAYERS),
        ("ngram", {"mtp_strategy": "with_ngram"}, "method mtp"),
        ("ngram", {"num_model_steps": 2}, LAYERS),
        ("ngram", {"quantization": "wint8"}, LAYERS),
        ("ngram", {"draft_head_quantization": "target"}, LAYERS),
        ("ngram", {"enable_draft_logprob": True}, MODEL),
        ("auto", {"draft_p_min": 0.5}, MODEL),
        ("ngram", {"auto_with_mtp": True}, "method auto"),
        ("draft_model", {"auto_with_draft_model": True}, "method auto"),
    ],
)
def test_a_key_of_another_method_is_refused(method: str, keys: Keys, where: str) -> None:
    key, value = list(keys.items())[-1]
    got = f"{shown(value)} with method {method}"
    assert refusal({"method": method, **keys}) == f".{key}: expected only with {where}, got {got}"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_server_that_drafts_takes_the_keys_of_what_its_requests_may_choose(method: str) -> None:
    config = read(method=method, max_ngram_size=4, suffix_decoding_max_cached_requests=0)
    assert (config.max_ngram_size, config.suffix_decoding_max_cached_requests) == (4, 0)


@pytest.mark.parametrize("key", ["max_candidate_len", "verify_window"])
def test_candidates_belong_to_topp(key: str) -> None:
    text = f".{key}: expected only with verify_strategy topp, got 9 with verify_strategy greedy"
    assert refusal({"method": "ngram", "verify_strategy": "greedy", key: 9}) == text
    assert getattr(read(method="ngram", verify_strategy="topp", **{key: 9}), key) == 9


@pytest.mark.parametrize("key", [k for k in SPECULATIVE_KEYS if k not in ("method", "num_speculative_tokens")])
@pytest.mark.parametrize("method", ["naive", "ngram", "suffix"])
def test_every_key_is_accepted_with_its_default(method: str, key: str) -> None:
    default = SPECULATIVE_KEYS[key].default
    assert read(method=method, **{key: default}) == read(method=method)
    assert scope_of(key).where


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1 with method ngram, got 0"),
        ({"method": "mtp", "num_speculative_tokens": 0}, "at least 1 with method mtp, got 0"),
        (
            {"method": "mtp", "num_speculative_tokens": 2, "num_model_steps": 3},
            "num_model_steps (3), as nothing extends the drafts of mtp_strategy default, got 2",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2},
            "num_model_steps (2), as nothing extends the drafts of mtp_strategy default, got 5",
        ),
        (
            {"method": "mtp", "mtp_strategy": "with_ngram"},
            "more than num_model_steps (1), as mtp_strategy with_ngram extends the drafts, got 1 (the default)",
        ),
        (
            {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 2, "num_model_steps": 2},
            "more than num_model_steps (2), as mtp_strategy with_ngram extends the drafts, got 2",
        ),
        (
            {"method": "mtp", "suffix_decoding_max_tree_depth": 64},
            "more than num_model_steps (1), as mtp_strategy with_suffix extends the drafts, got 1 (the default)",
        ),
    ],
)
def test_a_number_of_drafts_that_cannot_be_made_is_refused(keys: Keys, text: str) -> None:
    assert refusal(keys) == f".num_speculative_tokens: expected {text}"


def test_ngram_sizes_are_a_range() -> None:
    text = ".max_ngram_size: expected at least min_ngram_size (4), got 3"
    assert refusal({"method": "ngram", "max_ngram_size": 3, "min_ngram_size": 4}) == text


def test_the_limit_of_drafts_is_what_fits_the_batch(model: str) -> None:
    def config(k: int, max_num_batched_tokens: int) -> Config:
        return config_from_kwargs(
            model=model,
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            speculative_config={"method": "ngram", "num_speculative_tokens": k},
        )

    assert config(9, 20).speculative.num_speculative_tokens == 9
    with pytest.raises(ConfigError) as caught:
        config(9, 19)
    assert caught.value.message == (
        "speculative_config.num_speculative_tokens: expected at most 8 (one request may run 9 of max_num_batched_tokens"
        " 19 with max_num_seqs 8, of which one is no draft), got 9 (keyword argument)"
    )


def test_every_key_of_a_method_is_declared() -> None:
    for method in METHODS.values():
        assert {*method.keys, *filter(None, [method.file_key])} <= set(SPECULATIVE_KEYS)


def test_a_draft_model_is_on_one_rank_or_on_all() -> None:
    keys = {"method": "draft_model", "model": "dir"}
    for size in (1, 4):
        config = config_from_kwargs(
            model="demo", tensor_parallel_size=4, speculative_config={**keys, "draft_tensor_parallel_size": size}
        )
        assert config.speculative.draft_tensor_parallel_size == size
    text = r"draft_tensor_parallel_size: expected 1 or tensor_parallel_size \(4\), got 2"
    with pytest.raises(ConfigError, match=text):
        config_from_kwargs(
            model="demo", tensor_parallel_size=4, speculative_config={**keys, "draft_tensor_parallel_size": 2}
        )
    assert refusal({"method": "mtp", "draft_tensor_parallel_size": 1}).startswith(
        ".draft_tensor_parallel_size: expected only with method draft_model, medusa, hydra or mlp_speculator, or auto"
    )
