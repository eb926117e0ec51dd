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

# A directory of draft layers names itself so, or as its target.
DRAFT_ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    **ARCHITECTURES,
    "Ernie4_5_MTPForCausalLM": ernie4_5.read_ernie4_5_mtp,
}


def read_decoder_config(values: Mapping[str, Any]) -> DecoderConfig:
    """Turn a checkpoint's config.json into a DecoderConfig.

    Raises:
        CheckpointError: unknown architecture, or a key is missing, mistyped or unsupported.
    """
    return _read(values, ARCHITECTURES)


def read_draft_config(values: Mapping[str, Any]) -> DecoderConfig:
    """Turn the config.json beside draft layers into a DecoderConfig; raises as read_decoder_config."""
    return _read(values, DRAFT_ARCHITECTURES)


def _read(
    values: Mapping[str, Any], readers: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]]
) -> DecoderConfig:
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if name not in readers:
        hint = suggest(name, readers)
        raise CheckpointError(f"config.json: architectures: expected one of {', '.join(readers)}, got {names!r}{hint}")
    return readers[name](values)
