"""Tells from a checkpoint's JSON files whether its weights are quantised, and by which method.

Knows how Hugging Face's and Paddle's tools describe that; knows no tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.storages.registry import Storage, described_storage
from fastdeploy_sd.process.files import read_json

# Names of methods in errors, where they differ from those in the files.
_NAMES = {
    "awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "fbgemm_fp8": "FBGEMM FP8", "gguf": "GGUF", "hqq": "HQQ",
    "mxfp8": "MXFP8", "nvfp4": "NVFP4", "modelopt": "ModelOpt", "quark": "Quark",
    "auto-round": "AutoRound", "torchao": "TorchAO", "bitsandbytes": "bitsandbytes",
}  # fmt: skip
_NOTHING = (None, "", "none", "None", "dense", False, 0)
# Keys whose value is the name of a method, the most precise first.
_METHOD_KEYS = (
    "quant_method", "quant_algo", "quantization", "weight_quantize_algo", "moe_quant_type", "dense_quant_type",
)  # fmt: skip
_BITS_KEYS = ("bits", "w_bit", "weight_bits")
# How FastDeploy quantises plain weights while it loads them; the stored weights are plain.
_AT_LOADING = ("wint8", "wint4", "mix_quant")
_log = logging.getLogger(__name__)


def read_storages(folder: Path, config: Mapping[str, Any]) -> tuple[Storage, ...]:
    """Return the storages that a checkpoint says its quantised weights are in.

    The folder's quantize_config.json, quant_config.json and hf_quant_config.json are read too.

    Raises CheckpointError: they are in none that is read, which is named, or a description cannot be understood.
    """
    storages = dict[str, Storage]()
    if config.get("is_quantized") not in _NOTHING:
        raise _refusal(f"{folder / 'config.json'}: is_quantized", "quantised")
    for where, description in _descriptions(folder, config):
        if not isinstance(description, Mapping):
            raise CheckpointError(f"{where}: expected a map that describes quantised weights, got {shown(description)}")
        method = _method(description)
        storage = described_storage(where, description)
        if storage is not None:
            storages[storage.name] = storage
            _log.info("%s: weights are stored as %s", where, storage.name)
            if _has_input_scales(description):
                _log.info("%s: scales of inputs are not used: every row of inputs gets its own", where)
        elif method in _AT_LOADING and description.get("is_quantized") in _NOTHING:
            _log.info("%s: asks for %s as FastDeploy loads; here --quantization says so", where, method)
        elif method is not None:
            raise _refusal(where, f"{_NAMES.get(method, method)}{_variant(description)}")
    return tuple(storages.values())


def _descriptions(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key) not in (*_NOTHING, {}):
            yield f"{folder / 'config.json'}: {key}", config[key]
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        values = read_json(folder / name, missing_ok=True)
        if values:
            yield str(folder / name), values.get("quantization", values)


def _method(description: Mapping[str, Any]) -> str | None:
    """Return the method's name as the file has it, None where the description means plain weights."""
    if description.get("quant_method") == "bitsandbytes" and not _loads_in_bits(description):
        return None
    if description.get("quant_method") == "compressed-tensors" and description.get("format") == "dense":
        return None
    methods = [description[key] for key in _METHOD_KEYS if description.get(key) not in _NOTHING]
    # One part may be plain or quantised at loading while another is stored quantised.
    stored = [method for method in methods if method not in _AT_LOADING]
    if stored or methods:
        return shown(str((stored or methods)[0])[:40])[1:-1]
    if any(description.get(key) not in _NOTHING for key in _BITS_KEYS):
        return "quantised"
    is_told = any(key in description for key in (*_METHOD_KEYS, *_BITS_KEYS))
    return None if is_told or not description else "quantised in an unknown way"


def _has_input_scales(description: Mapping[str, Any]) -> bool:
    groups = description.get("config_groups")
    inputs = [
        group.get("input_activations")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    is_static = any(isinstance(each, Mapping) and each.get("dynamic") is False for each in inputs)
    return is_static or description.get("activation_scheme") == "static" or description.get("quant_algo") == "FP8"


def _loads_in_bits(description: Mapping[str, Any]) -> bool:
    keys = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")
    return any(description.get(key) not in _NOTHING for key in keys)


def _variant(description: Mapping[str, Any]) -> str:
    if description.get("quant_method") == "modelopt" and isinstance(description.get("quant_algo"), str):
        return f" {shown(description['quant_algo'][:40])[1:-1]}"
    found = [description[key] for key in _BITS_KEYS if isinstance(description.get(key), int)]
    found += [bits for bits in (4, 8) if description.get(f"load_in_{bits}bit") is True]
    return f" {found[0]}-bit" if found else ""


def _refusal(where: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: this checkpoint is {kind}: expected unquantised weights, which --quantization wint8 or wint4 "
        "quantises as they are loaded, or AWQ, GPTQ, compressed-tensors, FP8 or gpt-oss's MXFP4 as docs/models.md says"
    )
