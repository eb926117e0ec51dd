"""Options of FastDeploy that this version does not implement."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import SpeculativeConfig, config_from_kwargs, load_config
from fastdeploy_sd.config.catalogue import KNOWN_NAMES
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS
from fastdeploy_sd.config.unsupported import (
    INSTEAD,
    UNSUPPORTED,
    UNSUPPORTED_EPLB,
    UNSUPPORTED_QUANTIZATION,
    UNSUPPORTED_SPECULATIVE,
)
from fastdeploy_sd.errors import ConfigError, shown


@pytest.mark.parametrize(
    "flags",
    [
        "--max-waiting-time -1",
        "--max_waiting_time=-1",
        "--splitwise-role mixed",
        "--enable-logprob",
        "--no-enable-mm",
        "--scheduler-max-size -1",
        "--load-choices default_v1",
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(model: str, flags: str) -> None:
    assert load_config(["--model", model, *flags.split()]) == load_config(["--model", model])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--max-waiting-time 2", "max_waiting_time: '2' is not supported yet in this version (only -1 is); use max_"),
        ("--enable-mm", "enable_mm: true is not supported yet in this version (only false is)"),
        ("--no-enable-logprob", "enable_logprob: false is not supported yet in this version (only true is); log"),
        (
            "--scheduler-max-size 9",
            "scheduler_max_size: '9' is not supported yet in this version (only -1 is); use max_",
        ),
        ("--data-parallel-sise 2", "data_parallel_sise: unknown option (did you mean 'data_parallel_size'?)"),
    ],
)
def test_any_other_value_is_not_supported_yet(model: str, flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message.startswith(text)
    assert caught.value.message.endswith("(command line)")


def test_no_option_is_both_supported_and_not() -> None:
    assert UNSUPPORTED.keys().isdisjoint(KNOWN_NAMES)
    assert INSTEAD.keys() <= UNSUPPORTED.keys() | UNSUPPORTED_QUANTIZATION.keys() | UNSUPPORTED_EPLB.keys()


@pytest.mark.parametrize(
    "keys",
    [
        {"num_gpu_block_expand_ratio": 1.0, "enf_gen_phase_tag": False, "model_type": "main"},
        {"num-gpu-block-expand-ratio": 1, "sharing_model": None, "num_extra_cache_layer": 0},
    ],
)
def test_a_speculative_key_that_asks_for_nothing_is_accepted(model: str, keys: dict[str, object]) -> None:
    config = config_from_kwargs(model=model, speculative_config={"method": "ngram", **keys})
    assert config.speculative == SpeculativeConfig("ngram", 1)


@pytest.mark.parametrize(
    ("key", "value", "only"),
    [
        ("num_gpu_block_expand_ratio", 1.5, "1 or 1.0"),
        ("enf_gen_phase_tag", True, "false"),
        ("model_type", "mtp", "main"),
        ("sharing_model", "m", "none"),
        ("num_extra_cache_layer", 1, "0"),
    ],
)
def test_another_value_of_a_speculative_key_is_not_supported_yet(
    model: str, key: str, value: object, only: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, speculative_config={"method": "ngram", key: value})
    assert caught.value.message == (
        f"speculative_config.{key}: {shown(value)} is not supported yet in this version (only {only} is)"
        " (keyword argument)"
    )


def test_no_speculative_key_is_both_supported_and_not() -> None:
    assert UNSUPPORTED_SPECULATIVE.keys().isdisjoint(SPECULATIVE_KEYS)
