"""speculative_config: its sources, the defaults that follow from other keys, and how it is explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig, config_from_kwargs, explain, load_config
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.rules.sampling import MAX_LOGPROBS
from fastdeploy_sd.types.draft_methods import METHODS
from tests.unit.config.speculative_maps import read, refusal

WriteYaml = Callable[[str], str]
Keys = Mapping[str, object]
METHOD_LIST = ", ".join(METHODS)


def speculation(config: Config) -> dict[str, tuple[object, str]]:
    rows = {row.name: (row.value, row.origin) for row in explain(config)}
    prefix = "speculative_config."
    return {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}


# ---- methods and sources --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "method"),
    [("ngram", "ngram"), ("NGram", "ngram"), ("ngram_match", "ngram"), ("NGRAM_MATCH", "ngram"), (" MTP ", "mtp")],
)
def test_methods_have_any_case_and_an_alias(written: str, method: str) -> None:
    assert read(method=written).method == method


@pytest.mark.parametrize(
    "value",
    [
        "naive",
        " Naive ",
        {"method": "naive"},
        {"method": "NAIVE", "num_speculative_tokens": 0},
        {"method": "naive", "mtp_strategy": "default", "max_ngram_size": 5, "benchmark_mode": False, "model": None},
        '{"method": "naive", "verify_strategy": "target_match", "accept_policy": "normal"}',
    ],
)
def test_naive_is_accepted_with_what_asks_for_nothing(value: object) -> None:
    assert read_speculative(value).config == SpeculativeConfig()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"method": "ngran"},
            f".method: expected one of {METHOD_LIST}, got 'ngran' (did you mean 'ngram'?)",
        ),
        ({"method": 1}, f".method: expected one of {METHOD_LIST}, got 1"),
        ({"method": None}, f".method: expected one of {METHOD_LIST}, got null"),
        (
            "ngran",
            f".method: expected one of {METHOD_LIST}, got 'ngran' (did you mean 'ngram'?)",
        ),
        ("null", f".method: expected one of {METHOD_LIST}, got 'null'"),
        ("draft-model", f".method: expected one of {METHOD_LIST}, got 'draft-model'"),
        ({"num_speculative_tokens": 0}, ".num_speculative_tokens: expected at least 1 with method auto, got 0"),
        (
            {"method": "ngram", "max_ngram_size": 3, "prompt_lookup_max": 3},
            ".max_ngram_size: expected once, got it as ",
        ),
        ({"method": "ngram", "max_ngram": 3}, ".max_ngram: unknown key (did you mean 'max_ngram_size'?)"),
        ({"method": "ngram", 1: 2}, ".1: unknown key"),
        ({"method": "ngram", "model-type": "x"}, ".model_type: 'x' is not supported yet"),
        ("naive, auto", ": expected a JSON object, got text that is none"),
        ("[1]", ": expected a map, got [1]"),
        (3, ": expected a map, got 3"),
        ('{"method": "naive", "method": "mtp"}', ": expected every key once, got ['method', 'method']"),
        (
            {"method": "ngram", "max-ngram-size": 4, "max_ngram_size": 3},
            ": expected every key once, got ['method', 'max",
        ),
    ],
)
def test_what_is_no_map_of_known_keys_is_refused(value: object, text: str) -> None:
    assert refusal(value).startswith(text)


def test_json_yaml_and_keyword_arguments_say_the_same(model: str, yaml_file: WriteYaml) -> None:
    expected = SpeculativeConfig("ngram", 3, max_ngram_size=4)
    json_text = '{"method": "ngram", "num_speculative_tokens": 3, "max-ngram-size": 4}'
    body = "speculative_config:\n  method: ngram\n  num_speculative_tokens: 3\n  max_ngram_size: 4\n"
    keys = {"method": "ngram", "num_speculative_tokens": 3, "max_ngram_size": 4}
    configs = [
        load_config(["--model", model, "--speculative-config", json_text]),
        load_config(["--model", model, f"--speculative_config={json_text}"]),
        load_config(["--config", yaml_file(f"model: {model}\n{body}")]),
        load_config(["--config", yaml_file(f"model: {model}\nspeculative-config: '{json_text}'\n")]),
        config_from_kwargs(model=model, speculative_config=keys),
    ]
    assert [config.speculative for config in configs] == [expected] * len(configs)


def test_the_command_line_replaces_the_whole_map_of_the_file(model: str, yaml_file: WriteYaml) -> None:
    path = yaml_file(f"model: {model}\nspeculative_config: {{method: suffix, num_speculative_tokens: 9}}\n")
    config = load_config(["--config", path, "--speculative-config", '{"method": "ngram"}'])
    assert config.speculative == SpeculativeConfig("ngram", 1)


def test_a_refusal_says_where_the_map_was_written(model: str, yaml_file: WriteYaml) -> None:
    path = yaml_file(f"model: {model}\nspeculative_config:\n  method: ngram\n  max_ngram_size: 65\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", path])
    text = "speculative_config.max_ngram_size: expected an integer in 1..64, got 65"
    assert caught.value.message == f"{text} ({path}, line 2)"


# ---- where nothing is said ------------------------------------------------------------------------------------------

MOST = METHODS["auto"].default_num_drafts


@pytest.mark.parametrize("value", [None, {}, "auto", {"method": "Auto"}, "{}"])
def test_drafts_are_chosen_unless_another_method_is_named(value: object) -> None:
    assert read_speculative(value).config == SpeculativeConfig("auto", MOST)
    keys = {"num_speculative_tokens": 3, "max_ngram_size": 4}
    assert read(**keys) == SpeculativeConfig("auto", 3, max_ngram_size=4)


def test_one_word_names_a_method(model: str, yaml_file: WriteYaml) -> None:
    path = yaml_file(f"model: {model}\nspeculative_config: ngram\n")
    assert load_config(["--config", path]).speculative == SpeculativeConfig("ngram", 1)
    config = load_config(["--config", path, "--speculative-config", "naive"])
    assert speculation(config) == {"method": ("naive", "command line"), "num_speculative_tokens": (0, "default")}
    assert config_from_kwargs(model=model, speculative_config="naive").speculative == SpeculativeConfig()


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "method", "num_drafts"),
    [
        (2048, 1, "auto", MOST),
        (2048, 2048, "auto", MOST),
        (64, 2, "auto", MOST - 1),
        (4, 4, "auto", 1),
        (3, 3, "naive", 0),
    ],
)
def test_the_default_number_of_drafts_fits_a_step_of_one_request(
    model: str, num_tokens: int, num_seqs: int, method: str, num_drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What starts without drafts starts as it is, and says nothing of it."""
    config = config_from_kwargs(model=model, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    assert config.speculative == SpeculativeConfig(method, num_drafts)
    origins = {origin for _, origin in speculation(config).values()}
    assert origins <= {"default", "max_num_batched_tokens", "keyword argument"}
    assert ("max_num_batched_tokens" in origins) == (num_drafts < MOST)
    assert not caplog.messages


def test_what_was_asked_for_is_refused_where_it_has_no_room(model: str) -> None:
    written: list[object] = ["auto", {"max_ngram_size": 4}, {"num_speculative_tokens": 1}]
    for value in written:
        with pytest.raises(ConfigError, match="num_speculative_tokens: expected at most 0 "):
            config_from_kwargs(model=model, max_num_seqs=3, max_num_batched_tokens=3, speculative_config=value)


# ---- what follows from other keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
def test_a_drafting_method_makes_one_draft_by_default(method: str) -> None:
    config = read(method=method)
    assert (config.num_speculative_tokens, config.num_model_steps) == (1, 1)


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({"num_speculative_tokens": 3}, (3, 3)),
        ({"num_model_steps": 3}, (3, 3)),
        ({"num_speculative_tokens": 3, "num_model_steps": 3}, (3, 3)),
        ({"num_speculative_tokens": 7, "mtp_strategy": "default"}, (7, 7)),
        ({"num_speculative_tokens": 3, "mtp_strategy": "with_ngram"}, (3, 1)),
        ({"num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_suffix"}, (5, 2)),
    ],
)
def test_lengths_follow_one_another_where_mtp_drafts_alone(keys: Keys, lengths: tuple[int, int]) -> None:
    config = read(method="mtp", **keys)
    assert (config.num_speculative_tokens, config.num_model_steps) == lengths


def test_suffix_keys_beside_mtp_mean_the_hybrid() -> None:
    """FastDeploy's documentation publishes this map as its example of suffix decoding; every value is a default."""
    config = read(
        method="mtp",
        num_speculative_tokens=4,
        suffix_decoding_max_tree_depth=64,
        suffix_decoding_max_cached_requests=10000,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    )
    assert config == SpeculativeConfig("mtp", 4, mtp_strategy="with_suffix")
    alone = read(method="mtp", mtp_strategy="default", num_speculative_tokens=4, suffix_decoding_max_tree_depth=64)
    assert alone == SpeculativeConfig("mtp", 4, num_model_steps=4)


def test_benchmark_mode_rejects_every_draft() -> None:
    assert read(method="ngram", benchmark_mode=True).accept_policy == "reject_all"
    assert read(method="ngram", benchmark_mode=True, accept_policy="reject_all").accept_policy == "reject_all"
    assert read(method="ngram", benchmark_mode=False, accept_policy="accept_all").accept_policy == "accept_all"
    for policy in ("normal", "accept_all"):
        text = f".accept_policy: expected reject_all with benchmark_mode, got '{policy}'"
        assert refusal({"method": "ngram", "benchmark_mode": True, "accept_policy": policy}) == text


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (SpeculativeConfig(), "naive"),
        (SpeculativeConfig("mtp", 2), "mtp"),
        (SpeculativeConfig("mtp", 2, mtp_strategy="with_ngram"), "mtp-ngram"),
        (SpeculativeConfig("mtp", 2, mtp_strategy="with_suffix"), "mtp-suffix"),
    ],
)
def test_labels(config: SpeculativeConfig, label: str) -> None:
    assert config.label == label


# ---- explanation ----------------------------------------------------------------------------------------------------


def test_explain_shows_what_is_in_effect_and_why(model: str, yaml_file: WriteYaml) -> None:
    body = "speculative_config: {method: mtp, num_speculative_tokens: 3, benchmark_mode: true}\n"
    path = yaml_file(f"model: {model}\n{body}")
    at = f"{path}, line 2"
    rows = speculation(load_config(["--config", path]))
    assert rows["max_ngram_size"] == (5, "default")  # a request may choose ngram
    assert {key: row for key, row in rows.items() if "ngram" not in key and "suffix" not in key} == {
        "method": ("mtp", at),
        "num_speculative_tokens": (3, at),
        "mtp_strategy": ("default", "default"),
        "num_model_steps": (3, f"num_speculative_tokens, {at}"),
        "model": (None, "default"),
        "quantization": (None, "default"),
        "draft_p_min": (0.0, "default"),
        "draft_head_quantization": ("auto", "default"),
        "verify_strategy": ("target_match", "default"),
        "accept_policy": ("reject_all", f"benchmark_mode, {at}"),
        "enable_draft_logprob": (False, "default"),
        "follow_copies": (True, "default"),
        "draft_trees": (False, "default"),
    }


def test_explain_names_the_key_that_made_a_hybrid(model: str) -> None:
    keys = {"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 32}
    rows = speculation(config_from_kwargs(model=model, speculative_config=keys))
    assert rows["mtp_strategy"] == ("with_suffix", "suffix_decoding_max_tree_depth, keyword argument")
    assert rows["num_model_steps"] == (1, "default")
    assert rows["suffix_decoding_max_cached_requests"] == (10_000, "default")
    assert "max_candidate_len" not in rows


def test_explain_of_plain_decoding_has_no_row_of_a_method_that_drafts() -> None:
    rows = {"method": ("naive", "default"), "num_speculative_tokens": (0, "default")}
    assert speculation(Config(ModelConfig("m"))) == rows


def test_naive_takes_a_number_of_drafts_and_says_that_it_makes_none(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_from_kwargs(model=model, speculative_config={"method": "naive", "num_speculative_tokens": 1})
    assert config.speculative == SpeculativeConfig()
    assert speculation(config)["num_speculative_tokens"] == (0, "method naive, keyword argument")
    assert caplog.messages == [
        "speculative_config.num_speculative_tokens: 1 is 0 in effect: method naive makes no drafts"
    ]


def test_trees_take_less_probable_tokens_than_chains() -> None:
    key = "suffix_decoding_min_token_prob"
    read = read_speculative({"draft_trees": True})
    assert (getattr(read.config, key), read.origins[key]) == (0.01, "draft_trees")
    assert getattr(read_speculative({"draft_trees": True, key: 0.3}).config, key) == 0.3
    assert getattr(read_speculative({"draft_trees": False}).config, key) == 0.1


def test_trees_of_a_model_have_other_rows_than_passes() -> None:
    config = read(method="eagle3", model="m", num_model_steps=3, num_speculative_tokens=8, draft_trees=True)
    assert (config.num_speculative_tokens, config.num_model_steps, config.model_top_k) == (8, 3, 4)
    assert read(method="mtp", num_model_steps=3, draft_trees=True).num_speculative_tokens == 3
    assert read(method="mtp", draft_trees=True, draft_top_k=2).model_top_k == 2
    assert read(method="mtp", num_speculative_tokens=3).model_top_k == 1
    hybrid = read(method="mtp", mtp_strategy="with_ngram", num_speculative_tokens=4, draft_trees=True)
    assert hybrid.model_top_k == 1, "the other method follows a chain"
    for keys, got in ({"method": "mtp"}, False), ({"method": "ngram", "draft_trees": True}, True):
        text = ".draft_top_k: expected only with draft_trees and a model whose drafts nothing extends"
        assert refusal({**keys, "draft_top_k": 2}) == f"{text}, got 2 with draft_trees {got}"
    most = SPECULATIVE_KEYS["draft_top_k"].spec.maximum
    assert (most or 0) <= MAX_LOGPROBS, "more than a device has room for"
    short = {"method": "mtp", "num_model_steps": 3, "num_speculative_tokens": 2, "draft_trees": True}
    assert refusal(short) == ".num_speculative_tokens: expected at least num_model_steps (3), got 2"


@pytest.mark.parametrize("method", ["ernie_mtp", "deepseek_mtp", "glm4_moe_mtp", "NEXTN"])
def test_other_programs_names_of_mtp_are_understood(method: str) -> None:
    assert read_speculative({"method": method}).config == SpeculativeConfig("mtp", 1)


def test_names_of_the_look_up_at_vllm_are_understood() -> None:
    keys = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 3}
    assert read_speculative(keys).config == SpeculativeConfig("ngram", 1, max_ngram_size=4, min_ngram_size=3)


def test_whoever_says_something_of_draft_layers_to_auto_gets_them() -> None:
    assert not read_speculative({"method": "auto"}).config.draft_models
    for keys, num_steps in ({"auto_with_mtp": True}, 3), ({"num_model_steps": 2}, 2), ({"model": "dir"}, 3):
        config = read_speculative({"method": "auto", **keys}).config
        assert (config.draft_models, config.auto_with_mtp, config.num_model_steps) == (("mtp",), True, num_steps)
    short = read_speculative({"method": "auto", "auto_with_mtp": True, "num_speculative_tokens": 2}).config
    assert short.num_model_steps == 2
    with pytest.raises(ConfigError, match=r"num_model_steps: expected at most num_speculative_tokens \(2\), got 3"):
        read_speculative({"method": "auto", "num_model_steps": 3, "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=r"num_model_steps: expected only with method mtp, .* or auto"):
        read_speculative({"method": "auto", "auto_with_mtp": False, "num_model_steps": 3})


def test_auto_asks_a_draft_model_or_draft_layers() -> None:
    keys = {"auto_with_draft_model": True, "model": "dir"}
    config = read_speculative(keys).config
    assert (config.method, config.draft_models, config.num_model_steps) == ("auto", ("draft_model",), 5)
    config = read_speculative({**keys, "draft_method": "medusa"}).config
    assert (config.method, config.draft_models, config.num_model_steps) == ("auto", ("medusa",), 3)
    with pytest.raises(ConfigError, match="auto_with_draft_model: expected false with auto_with_mtp"):
        read_speculative({**keys, "auto_with_mtp": True})


def test_a_draft_model_makes_all_drafts() -> None:
    for keys, k in ({}, 5), ({"num_speculative_tokens": 3}, 3), ({"num_model_steps": 2}, 2):
        config = read_speculative({"method": "draft_model", "model": "dir", **keys}).config
        assert (config.num_speculative_tokens, config.num_model_steps) == (k, k)
