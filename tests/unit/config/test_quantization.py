"""`quantization` as a name and as a map: what each says, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from fastdeploy_sd.config import (
    ModelConfig,
    Quantization,
    QuantizationFormats,
    config_from_kwargs,
    explain,
    formats_of,
    from_json,
    load_config,
    to_json,
)
from fastdeploy_sd.errors import ConfigError

# As FastDeploy's documentation has it.
MIX = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
MIX_FORMATS = QuantizationFormats(dense="wint8", moe="wint4", lm_head="wint8")


def read(model: str, value: object) -> Quantization | None:
    return config_from_kwargs(model=model, quantization=value, device="gpu").model.quantization


@pytest.mark.parametrize(
    ("value", "dense", "moe", "lm_head"),
    [
        (MIX, "wint8", "wint4", "wint8"),
        (MIX | {"lm_head_quant_type": "none"}, "wint8", "wint4", "none"),
        ({"quantization": "wint4", "lm_head_quant_type": "wint4"}, "wint4", "wint4", "wint4"),
        ({"quantization": "wint4", "dense-quant-type": "wint8"}, "wint8", "wint4", "wint8"),
        ({"quantization": "wint8", "dense_quant_type": "none"}, "none", "wint8", "none"),
        ({"quantization": "none", "lm_head_quant_type": "wint8"}, "none", "none", "wint8"),
        ({"moe_quant_type": "wint4"}, "none", "wint4", "none"),
        ({"dense_quant_type": "wint4", "moe_quant_type": None}, "wint4", "none", "wint8"),
    ],
)
def test_a_map_says_each_kinds_format(
    model: str, value: Mapping[str, object], dense: str, moe: str, lm_head: str
) -> None:
    found = read(model, value)
    assert found == QuantizationFormats(dense, moe, lm_head)  # type: ignore[arg-type]
    assert read(model, json.dumps(value)) == found


@pytest.mark.parametrize("name", ["wint8", "wint4", "fp8", "none"])
def test_a_map_that_says_what_a_name_does_is_the_name(model: str, name: Quantization) -> None:
    assert read(model, formats_of(name).to_map()) == name
    assert read(model, {"quantization": name}) == name
    assert read(model, "none" if name is None else name) == name


def test_keys_that_ask_for_nothing_are_accepted(model: str) -> None:
    assert read(model, MIX | {"is_quantized": False, "kv_cache_quant_type": None}) == MIX_FORMATS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"dense_quant": "wint4"}, ".dense_quant: unknown key (did you mean 'dense_quant_type'?)"),
        (
            {"dense_quant_type": "int4"},
            ".dense_quant_type: expected one of none, wint8, wint4, fp8, got 'int4' (did you",
        ),
        ({"dense_quant_type": 4}, ".dense_quant_type: expected one of none, wint8, wint4, fp8, got 4"),
        ({"quantization": "mix"}, ".quantization: expected one of mix_quant, none, wint8, wint4, fp8, got 'mix'"),
        ({"quantization": "mix_quant", "moe_quant_type": "wint4"}, ".dense_quant_type: expected one of none, wint8, "),
        ({"quantization": "mix_quant", "dense_quant_type": "wint8"}, ".moe_quant_type: expected one of none, wint8, "),
        (MIX | {"kv_cache_quant_type": "int8"}, ".kv_cache_quant_type: 'int8' is not supported yet in this version"),
        (MIX | {"is_quantized": True}, ".is_quantized: true is not supported yet in this version (only false is)"),
        ({}, ": expected some of quantization, dense_quant_type, moe_quant_type, lm_head_quant_type, got none"),
        ('{"dense_quant_type"', ": expected a JSON object, got text that is none: "),
        ('{"moe_quant_type": "wint8", "moe_quant_type": "wint4"}', ": expected every key once, got ["),
        (["wint8"], ": expected one of none, wint8, wint4, fp8, a map, or null, got ['wint8']"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(model: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(model, value)
    assert caught.value.message.startswith(f"quantization{text}")
    assert caught.value.message.endswith("(keyword argument)")
    assert caught.value.param == "quantization"


def test_every_source_of_options_takes_a_map(model: str, yaml_file: Callable[[str], str]) -> None:
    path = yaml_file(f"model: {model}\nquantization:\n  lm_head_quant_type: none\n  quantization: wint4\n")
    want = QuantizationFormats("wint4", "wint4", "none")
    assert load_config(["--config", path]).model.quantization == want
    assert load_config(["--model", model, "--quantization", json.dumps(want.to_map())]).model.quantization == want
    assert config_from_kwargs(model=model, quantization=want).model.quantization == want


def test_it_is_shown_and_handed_on_as_a_map(model: str) -> None:
    config = config_from_kwargs(model=model, quantization=MIX)
    assert from_json(to_json(config)) == config
    shown = next(row.value for row in explain(config) if row.name == "quantization")
    assert shown == MIX | {"lm_head_quant_type": "wint8"}


def test_a_section_by_hand_has_the_shortest_form() -> None:
    assert ModelConfig("m", quantization=MIX_FORMATS).quantization == MIX_FORMATS
    with pytest.raises(
        ConfigError, match="quantization: expected one of none, wint8, wint4, fp8, a map, or null, got Q"
    ):
        ModelConfig("m", quantization=formats_of("wint4"))
