"""Which architectures are served, and how config.json names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy_sd.errors import CheckpointError, suggest
from fastdeploy_sd.models import ernie4_5, llama, qwen
from fastdeploy_sd.models.decoder_config import DecoderConfig

ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "Ernie4_5ForCausalLM": ernie4_5.read_ernie4_5,
    "Ernie4_5_ForCausalLM": ernie4_5.read_ernie4_5,  # the spelling of the first Paddle releases
    "Ernie4_5_MoeForCausalLM": ernie4_5.read_ernie4_5_moe,
    "LlamaForCausalLM": llama.read_config,
    "Qwen2ForCausalLM": qwen.read_qwen2,
    "Qwen3ForCausalLM": qwen.read_qwen3,
    "Qwen3MoeForCausalLM": qwen.read_qwen3_moe,
}


def read_decoder_config(values: Mapping[str, Any]) -> DecoderConfig:
    """Turn a checkpoint's config.json into a DecoderConfig.

    Raises:
        CheckpointError: unknown architecture, or a key is missing, mistyped or unsupported.
    """
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if name not in ARCHITECTURES:
        hint = suggest(name, ARCHITECTURES)
        raise CheckpointError(
            f"config.json: architectures: expected one of {', '.join(ARCHITECTURES)}, got {names!r}{hint}"
        )
    return ARCHITECTURES[name](values)
