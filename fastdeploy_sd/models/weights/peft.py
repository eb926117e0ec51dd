"""Reads a low-rank adapter of a folder in PEFT's layout: adapter_config.json and adapter_model.safetensors.

Knows names, ranks and scales, no model. What asks for more than the product of two matrices is refused.
Source: the folders that PEFT writes, https://github.com/huggingface/peft.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Boolean, Field, FieldReader, Integer, Number
from fastdeploy_sd.models.weights.safetensors import SafetensorsFile
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.process.files import read_json
from fastdeploy_sd.types import F32

CONFIG_NAME, WEIGHTS_NAME, _PICKLED_NAME = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_CHUNK_BYTES = 1 << 24
# The module's name in the model, and the same without what its layers are in; the matrix.
_NAME = re.compile(
    r"base_model\.model\.((?:model\.language_model|language_model\.model|model)\.(.+))\.lora_([AB])\.weight"
)
_FIELDS: Mapping[str, Field] = {
    "r": Integer(1, MAX_I32),
    "lora_alpha": Number(0, 1e9),
    "use_rslora": Boolean(),
}
# What changes the computation, and the values that ask for no change.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    # Others change the model's own weights before training.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# What says how the adapter was made, or names what the tensors show.
_UNUSED = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("lora_dropout", "fan_in_fan_out", "eva_config", "runtime_config", "megatron_core", "qalora_group_size"),
}


class LoraMatrices(NamedTuple):
    """y += scale * (x . a^T) . b^T, with a f32[r, inputs] and b f32[outputs, r]."""

    a: F32
    b: F32
    scale: float


class PeftAdapter:
    """An adapter's folder.

    Attributes:
        path: of its tensors, which errors name.
        modules: `layers.3.self_attn.q_proj` and the like -> rank, (outputs, inputs).

    Raises (on construction) CheckpointError: a file is missing or malformed, or asks for what is not supported.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"lora: expected the folder of an adapter, got {str(folder)!r}", param="lora_modules")
        self.path, self._config_path = folder / WEIGHTS_NAME, folder / CONFIG_NAME
        if not self.path.exists() and (folder / _PICKLED_NAME).exists():
            raise CheckpointError(f"{folder}: expected {WEIGHTS_NAME}, got {_PICKLED_NAME}, a pickle that may run code")
        self._config = FieldReader(read_json(self._config_path), _FIELDS, str(self._config_path))
        self._verify_config()
        self._file = SafetensorsFile(self.path)
        self._names: dict[str, tuple[str, str]] = {}
        self._full_names: dict[str, str] = {}
        self.modules = dict(self._modules())
        self._verify_modules()

    def matrices(self, module: str) -> LoraMatrices:
        """Return those of one of the modules."""
        a, b = (widen(self._file.tensor(name)) for name in self._names[module])
        rank = len(a)
        alpha = self._of_module("alpha_pattern", module, self._config.number("lora_alpha"))
        return LoraMatrices(a, b, alpha / (math.sqrt(rank) if self._config.boolean("use_rslora") else rank))

    def digest(self) -> str:
        """Return 32 hexadecimal digits: BLAKE2b of what the computation follows from."""
        about = {name: self._config.values.get(name) for name in (*_FIELDS, "alpha_pattern")}
        digest = hashlib.blake2b(repr(sorted(about.items())).encode(), digest_size=16)
        for data in self._file.spans(_CHUNK_BYTES):
            digest.update(data.data)
        return digest.hexdigest()

    def _verify_config(self) -> None:
        config = self._config
        config.require_neutral(_NEUTRAL)
        for name, value in config.values.items():
            if name not in _FIELDS.keys() | _NEUTRAL.keys() | _UNUSED and value not in (None, False, [], {}):
                raise config.error(name, "no such key (it is not supported)", value)
        for name in ("rank_pattern", "alpha_pattern"):
            patterns = config.values.get(name) or {}
            if not isinstance(patterns, dict):
                raise config.error(name, "a map", patterns)
            for key, value in patterns.items():
                # Keys are regular expressions, which a file might make slow: only names are taken.
                if not re.fullmatch(r"\^?[\w.]+\$?", key):
                    raise config.error(name, "names of modules as keys", key)
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_I32:
                    raise config.error(f"{name}: {shown(key)}", "a number above 0", value)

    def _modules(self) -> Iterator[tuple[str, tuple[int, tuple[int, int]]]]:
        found: dict[str, dict[str, str]] = {}
        for name, entry in self._file.entries.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise self._error(name, "lora_A.weight and lora_B.weight of linear layers alone", shown(name))
            if entry.dtype not in ("F32", "F16", "BF16") or len(entry.shape) != len(("rows", "columns")):
                raise self._error(name, "a matrix of F32, F16 or BF16", f"{entry.dtype}{list(entry.shape)}")
            self._full_names[match[2]] = match[1]
            found.setdefault(match[2], {})[match[3]] = name
        for module, names in found.items():
            if len(names) != len("AB"):
                raise self._error(module, "lora_A and lora_B", f"lora_{next(iter(names))} alone")
            self._names[module] = names["A"], names["B"]
            (rank, inputs), (outputs, columns) = (self._file.entries[names[key]].shape for key in "AB")
            wanted = self._of_module("rank_pattern", module, self._config.integer("r"))
            if not rank == columns == wanted:
                got = f"lora_A[{rank}, {inputs}] and lora_B[{outputs}, {columns}]"
                raise self._error(module, f"rank {wanted:g}, as {CONFIG_NAME} has it", got)
            yield module, (rank, (outputs, inputs))

    def _verify_modules(self) -> None:
        """Raise CheckpointError where the tensors of a target are missing."""
        targets = self._config.values.get("target_modules")
        if not self.modules:
            raise self._error("tensors", "at least one module", "none")
        for target in targets if isinstance(targets, list) else ():
            if not any(_is_named(name, str(target)) for name in self._full_names.values()):
                raise self._error(shown(target), f"its tensors, as {CONFIG_NAME} has it in target_modules", "none")

    def _of_module(self, patterns: str, module: str, default: float) -> float:
        """Return the value of the first pattern that names a module."""
        found: Mapping[str, float] = self._config.values.get(patterns) or {}
        full_name = self._full_names[module]
        return next((value for key, value in found.items() if _is_named(full_name, key.strip("^$"))), default)

    def _error(self, what: str, expected: str, got: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: expected {expected}, got {got}")


def _is_named(full_name: str, name: str) -> bool:
    """Whether a name means a module: its whole name in the model, or its last parts."""
    return full_name == name or full_name.endswith(f".{name}")
