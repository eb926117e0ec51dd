"""Quantised checkpoints are refused by the name of their method; descriptions that can be read are taken."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import SafetensorsFile, read_config

QUANTISED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes 4-bit"),
    "quark": ({"quant_method": "quark"}, "Quark"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt NVFP4"),
    "unheard of": ({"quant_method": "zip-weights"}, "zip-weights"),
    "without a name": ({"bits": 4}, "quantised 4-bit"),
    "without sense": ({"foo": 1}, "quantised in an unknown way"),
    "of a list": ({"quant_method": ["awq"]}, r"\['awq'\]"),
    "Paddle's": ({"quantization": "wint2", "moe_quant_type": "w4w2"}, "wint2"),
    "Paddle's, stored": ({"quantization": "wint8", "is_quantized": True}, "wint8"),
    "PaddleNLP's": ({"weight_quantize_algo": "a8w8"}, "a8w8"),
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
READ: dict[str, Any] = {
    "none": None,
    "empty": {},
    "no method": {"quant_method": None, "weight_quantize_algo": None, "quantization": "", "shift": False},
    "none by name": {"quant_method": "none"},
    "bitsandbytes off": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 8},
    "auto-round": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "compressed-tensors": COMPRESSED,
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "e4m3 in blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "dense": {"quant_method": "compressed-tensors", "format": "dense"},
    "at loading": {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"},
}


def write(folder: pathlib.Path, name: str, value: object) -> pathlib.Path:
    (folder / name).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("name", QUANTISED)
def test_a_method_is_refused_by_its_name(tmp_path: pathlib.Path, name: str) -> None:
    description, kind = QUANTISED[name]
    write(tmp_path, "config.json", {"quantization_config": description})
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: this checkpoint is {kind}: "):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"quant_method": "awq", "bits": 3}, "bits: expected 4 of AWQ, got 3"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "version: expected AWQ's layout gemm, got 'gemv_fast'"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "checkpoint_format: expected gptq or gptq_v2, got 'm",
        ),
        (
            {"quant_method": "gptq", "checkpoint_format": ["gptq"]},
            r"checkpoint_format: expected gptq .*, got \['gptq'\]",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"weight_block_size: expected \[128, 128\], got"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: expected e4m3, got 'e5m2'"),
        (
            COMPRESSED | {"format": "nvfp4-pack-quantized"},
            "format: expected one of pack-quantized, .*, got 'nvfp4-pack",
        ),
        (COMPRESSED | {"config_groups": {"a": {"format": "mxfp8-quantized"}}}, "config_groups.a.format: expected one"),
        (COMPRESSED | {"config_groups": {"a\nb": {"format": "c"}}}, r"config_groups.a\\nb.format: expected one"),
        ({"quant_method": "a\nwq"}, r"this checkpoint is a\\nwq: expected"),
        ({"quant_method": "modelopt", "quant_algo": "a\nb"}, r"this checkpoint is ModelOpt a\\nb: expected"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format: expected one of"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "transform_config: expected none, got"),
    ],
)
def test_variants_that_are_not_read_are_named(
    tmp_path: pathlib.Path, description: dict[str, Any], message: str
) -> None:
    write(tmp_path, "config.json", {"quantization_config": description})
    with pytest.raises(CheckpointError, match=f"quantization_config: {message}"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", READ)
def test_a_description_of_plain_weights_is_taken(tmp_path: pathlib.Path, name: str) -> None:
    write(tmp_path, "config.json", {"quantization_config": READ[name], "is_quantized": False})
    assert read_config(tmp_path)["quantization_config"] == READ[name]


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128},
            "quantize_config.json: this .* is quantised 4-bit",
        ),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "quant_config.json: this checkpoint is quantised 4-bit"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json: this .* is NVFP4"),
        ("config.json", {"is_quantized": True}, "is_quantized: this checkpoint is quantised"),
        ("config.json", {"compression_config": {"format": "int-quantized"}}, "compression_config: this checkpoint"),
        (
            "config.json",
            {"quantization": {"bits": 4, "group_size": 64}},
            "quantization: this .* is quantised 4-bit",
        ),
        ("config.json", {"quantization_config": "awq"}, "quantization_config: expected a map .*got 'awq'"),
    ],
)
def test_the_other_places_of_a_description_are_read(
    tmp_path: pathlib.Path, file: str, value: object, message: str
) -> None:
    write(tmp_path, "config.json", {})
    write(tmp_path, file, value)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_only_a_format_of_the_cache_leaves_the_weights_plain(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "config.json", {})
    write(tmp_path, "hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert read_config(tmp_path) == {}


def test_a_file_with_eight_bit_floats_is_a_valid_file(tmp_path: pathlib.Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert SafetensorsFile(path).entries["a"].dtype == "F8_E4M3"
