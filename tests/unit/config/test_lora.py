"""The options of LoRA adapters: every form of a list, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd.config import config_from_kwargs, from_json, load_config, to_json
from fastdeploy_sd.errors import ConfigError

BOTH = ("a=/x", "b=/y=z")


@pytest.mark.parametrize(
    "argv",
    [
        ["--lora-modules", "a=/x", "b=/y=z"],
        ["--lora-modules", "a=/x", "--lora-modules", "b=/y=z"],
        ["--lora-modules=a=/x", '--lora-modules={"name": "b", "path": "/y=z", "base_model_name": "m"}'],
        ["--lora-modules", '[{"name": "a", "path": "/x"}, "b=/y=z"]', "--port", "1"],
    ],
)
def test_modules_of_a_command_line(argv: list[str]) -> None:
    config = load_config(["demo", *argv])
    assert config.lora.lora_modules == BOTH
    assert [(name, str(folder)) for name, folder in config.lora.modules] == [("a", "/x"), ("b", "/y=z")]
    assert (config.lora.is_enabled, config.lora.num_slots, config.lora.max_rank) == (True, 2, 16)
    assert from_json(to_json(config)).lora == config.lora


def test_adapters_may_come_later_and_have_places() -> None:
    assert config_from_kwargs(model="demo").lora.num_slots == 0
    assert config_from_kwargs(model="demo", enable_lora=True).lora.num_slots == 1
    config = config_from_kwargs(model="demo", lora_modules=[{"name": "a", "path": "/x"}], max_loras=3, max_lora_rank=64)
    assert (config.lora.num_slots, config.lora.max_rank) == (3, 64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_modules": "a"}, "lora_modules: expected name=path, got 'a'"),
        ({"lora_modules": "a="}, "lora_modules: expected name=path, got 'a='"),
        ({"lora_modules": "=x"}, "lora_modules: name: expected 1..128 printable characters"),
        ({"lora_modules": ["a=x", "a=y"]}, "lora_modules: expected every name once, got a again"),
        ({"lora_modules": "demo=x"}, "lora_modules: expected names that the model does not have, got 'demo'"),
        ({"lora_modules": [{"name": "a"}]}, "lora_modules: expected a map of name and path, got"),
        ({"lora_modules": [{"name": "a", "path": "x", "rank": 1}]}, "lora_modules: expected a map of name and path"),
        ({"lora_modules": "{"}, "lora_modules: expected a JSON object, got text that is none"),
        ({"lora_modules": "["}, "lora_modules: expected a non-empty string or a list of them, got '['"),
        ({"lora_modules": 5}, "lora_modules: expected a non-empty string or a list of them, got 5"),
        ({"lora_modules": [5]}, "lora_modules: expected name=path or a map of name and path, got 5"),
        ({"lora_modules": "a=x", "enable_lora": False}, "lora_modules: expected none with enable_lora false, got 1"),
        ({"max_loras": 2}, "max_loras: expected none without enable_lora or lora_modules, got 2 (keyword argument)"),
        ({"max_lora_rank": 8}, "max_lora_rank: expected none without enable_lora or lora_modules, got 8"),
        ({"lora_root": "/x"}, "lora_root: expected none without enable_lora or lora_modules, got /x"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras: expected an integer in 1..1024, or none, got 0"),
        ({"enable_lora": True, "max_lora_rank": 513}, "max_lora_rank: expected an integer in 1..512, or none, got 513"),
        ({"max_cpu_loras": 2}, "max_cpu_loras: unknown option (of vLLM; here: nothing: an adapter that gets a place"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model="demo", **options)
    assert text in caught.value.message
