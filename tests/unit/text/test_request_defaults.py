"""Defaults of requests from generation_config.json: what is read, from where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.config.generation_values import read_generation_values
from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.request_builder import RequestBuilder
from fastdeploy_sd.text.request_defaults import RequestDefaults, describe_defaults, read_request_defaults
from fastdeploy_sd.types import ModelInfo
from tests.unit.text.vocabularies import golden_tokenizer

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def folder(path: Path, values: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_values_come_from_the_checkpoint_or_a_folder_or_are_none(tmp_path: Path) -> None:
    own = folder(tmp_path / "own", {**QWEN, "min_p": None, "max_new_tokens": 2048, "pad_token_id": 3})
    other = folder(tmp_path / "other", {"min_p": 0.1})
    found = read_request_defaults("auto", own)
    assert found.max_tokens == 2048
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert read_request_defaults(str(other), own) == RequestDefaults({"min_p": 0.1})
    assert read_request_defaults("vllm", own) == read_request_defaults("auto", tmp_path) == RequestDefaults()
    assert describe_defaults("auto", own) == (
        "defaults of requests: temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1.05, max_tokens 2048, from"
        " generation_config.json; --generation-config vllm is without them"
    )
    assert describe_defaults("vllm", own) == "defaults of requests: OpenAI's"


def test_an_option_has_values_in_place_of_them(tmp_path: Path) -> None:
    own = folder(tmp_path / "own", QWEN)
    values = read_generation_values('{"temperature": 0.25, "max-new-tokens": 7, "top_p": null}')
    found = read_request_defaults("auto", own, values)
    assert found == RequestDefaults({**read_request_defaults("auto", own).sampling, "temperature": 0.25}, 7)
    assert describe_defaults("vllm", own, values) == (
        "defaults of requests: temperature 0.25, max_tokens 7, from override_generation_config"
    )
    assert read_generation_values(values) == values
    for text, wrong in (
        ("temperatur: unknown key", {"temperatur": 1}),
        ("top_k: expected a number, got 'x'", {"top_k": "x"}),
        ("expected a JSON object", "{"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_generation_values(wrong)
    with pytest.raises(ConfigError, match=r"override_generation_config\.top_p: expected a number in \(0, 1\], got 2"):
        read_request_defaults("auto", own, read_generation_values({"top_p": 2}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": "warm"}, r"generation_config\.json: temperature: expected a number in 0\.\..*, got 'warm'"),
        ({"top_p": 0}, r"generation_config\.json: top_p: expected a number in \(0, 1\], got 0"),
        ({"max_new_tokens": -5}, r"generation_config\.json: max_new_tokens: expected an integer in 0\.\..*, got -5"),
    ],
)
def test_a_wrong_value_names_the_file_and_the_key(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read_request_defaults("auto", folder(tmp_path / "m", values))


def test_a_folder_without_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="generation_config: expected auto, vllm or a folder with generation_config"):
        read_request_defaults(str(tmp_path), tmp_path)


def test_an_output_has_at_most_the_default_and_what_fits() -> None:
    info = ModelInfo("m", vocab_size=4096, max_model_len=32, eos_token_ids=(2,), block_size=16, num_blocks=8)
    builder = RequestBuilder(PromptEncoder(golden_tokenizer()), info, default_max_tokens=20)
    for prompt, params, most in (
        ([5] * 4, SamplingParams(), 20),
        ([5] * 30, SamplingParams(), 2),
        ([5] * 4, SamplingParams(max_tokens=25), 25),
        ([5] * 4, SamplingParams(min_tokens=22), 22),
    ):
        assert builder.build([prompt], params, "id")[0].max_tokens == most
    defaults = RequestDefaults({"top_k": 4}, 20)
    assert [defaults.params(n).max_tokens for n in (30, 3, -1)] == [20, 3, 1]
