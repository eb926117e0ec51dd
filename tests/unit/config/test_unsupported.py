"""Options of FastDeploy that this version does not implement, and speculative_config."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import SpeculativeConfig, config_from_kwargs, load_config
from fastdeploy_sd.config.catalogue import KNOWN_NAMES
from fastdeploy_sd.config.unsupported import INSTEAD, UNSUPPORTED
from fastdeploy_sd.errors import ConfigError


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-parallel-size 1",
        "-tp 1",
        "--tensor_parallel_size=1",
        "--splitwise-role mixed",
        "--enable-logprob",
        "--no-enable-mm",
        "--scheduler-max-size -1",
        "--load-choices default_v1",
        "--swap-space 0",
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(model: str, flags: str) -> None:
    assert load_config(["--model", model, *flags.split()]) == load_config(["--model", model])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--tensor-parallel-size 2", "tensor_parallel_size: '2' is not supported yet in this version (only 1 is)"),
        ("-tp=2", "tensor_parallel_size: '2' is not supported yet in this version (only 1 is)"),
        ("--splitwise-role prefill", "splitwise_role: 'prefill' is not supported yet in this version (only mixed is)"),
        ("--enable-mm", "enable_mm: True is not supported yet in this version (only false is)"),
        ("--no-enable-logprob", "enable_logprob: False is not supported yet in this version (only true is); log"),
        ("--gpu-memory-utilization 0.9", "gpu_memory_utilization: '0.9' is not supported yet in this version; use kv_"),
        ("--tensor-parallel-sise 2", "tensor_parallel_sise: unknown option (did you mean 'tensor_parallel_size'?)"),
    ],
)
def test_any_other_value_is_not_supported_yet(model: str, flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message.startswith(text)
    assert caught.value.message.endswith("(command line)")


def test_maps_are_not_supported_either(model: str) -> None:
    with pytest.raises(ConfigError, match=r"graph_optimization_config: .* is not supported yet"):
        config_from_kwargs(model=model, graph_optimization_config={"use_cudagraph": True})


def test_no_option_is_both_supported_and_not() -> None:
    assert UNSUPPORTED.keys().isdisjoint(KNOWN_NAMES)
    assert INSTEAD.keys() <= UNSUPPORTED.keys()


# ---- speculative_config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"method": "naive"},
        {"method": "NAIVE", "num_speculative_tokens": 0},
        '{"method": "naive", "verify_strategy": "target_match", "accept_policy": "normal"}',
        None,
    ],
)
def test_naive_is_accepted(model: str, value: object) -> None:
    assert config_from_kwargs(model=model, speculative_config=value).speculative == SpeculativeConfig()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"method": "mtp"}, ".method: expected one of naive, got 'mtp', which is not supported yet in this version"),
        (
            {"method": "ngran"},
            ".method: expected one of naive, got 'ngran', which is not a method (did you mean 'ngram'?",
        ),
        ({"method": 1}, ".method: expected one of naive, got 1"),
        ({}, ".method: expected one of naive, got nothing"),
        ({"metod": "naive"}, ".metod: unknown key (did you mean 'method'?)"),
        (
            {"method": "naive", "num_speculative_tokens": 3},
            ".num_speculative_tokens: expected 0, as method naive makes",
        ),
        ({"method": "naive", "num_speculative_tokens": False}, ".num_speculative_tokens: expected 0"),
        ({"method": "naive", "verify_strategy": "topp"}, ".verify_strategy: 'topp' is not supported yet"),
        ({"method": "naive", "max_ngram_size": 5}, ".max_ngram_size: 5 is not supported yet"),
        ("naive", ": expected a JSON object, got text that is none"),
        ("[1]", ": expected a map, got [1]"),
        ('{"method": "naive", "method": "mtp"}', ": expected every key once"),
    ],
)
def test_everything_else_is_refused(model: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, speculative_config=value)
    assert caught.value.message.startswith("speculative_config" + text)
    assert caught.value.message.endswith("(keyword argument)")
