"""Writes random adapters in PEFT's layout for tiny checkpoints, and checkpoints with the adapters in their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_sd.models.weights.peft import PeftAdapter
from fastdeploy_sd.ops.bf16 import widen
from tests.models import rewrite

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *DENSE)


def write_adapter(
    folder: Path,
    model: str,
    targets: Sequence[str] = ALL,
    *,
    seed: int = 0,
    rank: int = 4,
    change: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """Write a random adapter of a golden model's linear layers with these names; return its folder.

    `change`: tensors besides, or in place of those of the same names; `config`: further keys of adapter_config.json.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    ranks = config.get("rank_pattern", {})
    for name, weight in rewrite.read(model).items():
        module, _, role = name.rpartition(".")
        if role != "weight" or module.rsplit(".", 1)[-1] not in targets or ".experts." in name:
            continue
        own = next((value for key, value in ranks.items() if module.endswith(key)), rank)
        outputs, inputs = weight.shape
        of_a, of_b = (f"base_model.model.{module}.lora_{matrix}.weight" for matrix in "AB")
        tensors[of_a] = (rng.standard_normal((own, inputs)) / inputs**0.5).astype(np.float32)
        tensors[of_b] = (rng.standard_normal((outputs, own)) * 0.05).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    rewrite.write_file(folder / "adapter_model.safetensors", {**tensors, **(change or {})}, {"format": "pt"})
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def write_merged(folder: Path, model: str, adapter: Path) -> Path:
    """Write a golden model in float32 whose weights have the adapter's products added; return its folder."""
    read = PeftAdapter(adapter)
    tensors = {name: widen(value) for name, value in rewrite.read(model).items()}
    for module in read.modules:
        a, b, scale = read.matrices(module)
        name = f"model.{module}.weight"
        product = scale * (b.astype(np.float64) @ a.astype(np.float64))
        tensors[name] = (tensors[name] + product).astype(np.float32)
    rewrite.write_folder(folder, model)
    rewrite.write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder
