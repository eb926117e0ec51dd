"""Damages checkpoints of AWQ, GPTQ, compressed-tensors and FP8: what they say of themselves, and their tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.models import quantized_files as files
from tests.models import rewrite

Array = npt.NDArray[Any]

_MODELS = ("llama-tiny", "qwen2-tiny", "qwen3_moe-tiny")
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_METHODS = (
    files.awq(16), files.awq(32), files.gptq(4, 32), files.gptq(4, 16, act_order=True), files.gptq(2, 16),
    files.gptq(8, 32, "gptq_v2", act_order=True), files.pack_quantized(4, 32, has_zeros=True),
    files.pack_quantized(8, 16, act_order=True), files.pack_quantized(4, 0), files.int_quantized(has_zeros=True),
    files.int_quantized(is_tensor=True),
    *(files.float8(kind, _FP8) for kind in ("tensor", "channel", "block")),
)  # fmt: skip
_DESCRIPTIONS: tuple[dict[str, Any], ...] = (
    {"quant_method": "awq", "version": "gemv"}, {"quant_method": "awq", "bits": 8}, {"quant_method": "gptq", "bits": 3},
    {"quant_method": "gptq", "checkpoint_format": ["gptq"]}, {"quant_method": "compressed-tensors", "format": {}},
    {"quant_method": "compressed-tensors", "config_groups": {"a\nb": {"format": "x\ny"}}}, {"quant_method": ["fp8"]},
    {"quant_method": "fp8", "weight_block_size": [64, 64]}, {"quant_method": "fp8", "fmt": None}, {}, {"bits": 4},
    {"quant_method": "compressed-tensors", "sparsity_config": {"format": 5}}, {"quant_algo": "FP8"},
    {"quant_method": "compressed-tensors", "transform_config": {"a": "x" * 5000}},
    {"quant_method": "modelopt", "quant_algo": ["FP8"]}, {"quant_method": "awq\n", "w_bit": "4"},
)  # fmt: skip
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_FLOATS = (np.float16, np.float32, np.uint16)  # uint16: bfloat16


def write_mutant(rng: random.Random, folder: Path, mutate_value: Callable[[random.Random, Any], str]) -> str:
    """Write one damaged checkpoint into an empty folder and return what was done to it.

    `mutate_value` changes a value somewhere in a document.
    """
    model, method = rng.choice(_MODELS), rng.choice(_METHODS)
    tensors, _ = files.stored_model(model, method)
    description = json.loads(json.dumps(method.description))
    done = [
        _change_tensors(rng, tensors) if rng.random() < 0.7 else _change_description(rng, description, mutate_value)
        for _ in range(rng.choice((1, 1, 2, 4)))
    ]
    rewrite.write_folder(folder / "w", model, {"quantization_config": description})
    for path in (folder / "w").iterdir():
        path.rename(folder / path.name)
    (folder / "w").rmdir()
    if rng.random() < 0.1:
        name = rng.choice(_FILES)
        (folder / name).write_text(json.dumps(rng.choice(_DESCRIPTIONS)))
        done.append(f"with {name}")
    rewrite.write_file(folder / "model.safetensors", tensors)
    return f"{model} as {description.get('quant_method')!r}: " + "; ".join(done)


def _change_description(
    rng: random.Random, description: dict[str, Any], mutate_value: Callable[[random.Random, Any], str]
) -> str:
    if rng.random() < 0.6:
        return f"quantization_config{mutate_value(rng, description)}"
    other = rng.choice((*_DESCRIPTIONS, *(method.description for method in _METHODS)))
    description.clear()
    description.update(other)
    return f"quantization_config = {str(other)[:60]}"


def _change_tensors(rng: random.Random, tensors: dict[str, Array]) -> str:
    """Change tensors of quantised weights: of one, or in the same way of all of a role."""
    stored = [name for name in tensors if "_proj." in name]
    name = rng.choice(stored)
    role = name.rpartition(".")[2]
    kind, change = rng.choice(_CHANGES)
    for each in [other for other in stored if other.endswith(f".{role}")] if rng.random() < 0.3 else [name]:
        changed = change(rng, tensors.pop(each))
        if changed is not None:
            tensors[each] = changed
    return f"{kind}: {name}"


def _with_values(rng: random.Random, value: Array) -> Array:
    """Some elements become edges of their type."""
    flat = value.copy().reshape(-1)
    if not len(flat):
        return value
    if flat.dtype == np.uint16:
        edges: list[Any] = [0x7F80, 0xFF80, 0x7FC0, 0, 0x8000, 0x0001, 0x7F7F]
    elif flat.dtype.kind == "f":
        with np.errstate(over="ignore"):
            edges = list(np.array([np.nan, np.inf, -np.inf, 0, -1, 1e-45, 1e-7, 6e4, 3e38]).astype(flat.dtype))
    elif flat.dtype == np.bool_:
        edges = [False, True]
    else:
        limits = np.iinfo(flat.dtype)
        edges = [limits.min, limits.max, 0, 1, min(1000, limits.max)]
    begin = rng.randrange(len(flat))
    flat[begin : begin + rng.choice((1, 7, len(flat)))] = rng.choice(edges)
    return flat.reshape(value.shape)


def _with_shape(rng: random.Random, value: Array) -> Array:
    kinds: tuple[Callable[[], Array], ...] = (
        lambda: value[: rng.choice((0, 1, len(value) - 1, len(value) // 2))] if value.ndim else value,
        lambda: np.ascontiguousarray(value.T),
        lambda: value.reshape(-1),
        lambda: value.reshape(1, *value.shape),
        lambda: np.concatenate([value, value]) if value.ndim else value,
        lambda: np.repeat(value, 2, axis=-1) if value.ndim else value,
        lambda: value[..., ::2] if value.ndim else value,
        lambda: value.reshape(-1)[:1].reshape(rng.choice(((), (1,), (1, 1), (1, 1, 1)))) if value.size else value,
    )
    return rng.choice(kinds)()


def _with_type(rng: random.Random, value: Array) -> Array:
    types = (np.int8, np.uint8, np.int32, np.int64, np.bool_, *_FLOATS)
    with np.errstate(all="ignore"):
        return value.astype(rng.choice(types))


_CHANGES: tuple[tuple[str, Callable[[random.Random, Array], Array | None]], ...] = (
    ("values", _with_values), ("values", _with_values), ("shape", _with_shape), ("type", _with_type),
    ("order", lambda rng, value: value.reshape(-1)[_order(rng, value.size)].reshape(value.shape)),
    ("gone", lambda *_: None),
)  # fmt: skip


def _order(rng: random.Random, size: int) -> Array:
    return np.random.default_rng(rng.getrandbits(32)).permutation(size)
