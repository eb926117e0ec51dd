"""Which architectures are served, and how config.json names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models import (
    deepseek,
    ernie4_5,
    gemma,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    mistral,
    phi3,
    qwen,
    qwen_hybrid,
    smollm3,
)
from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.config_fields import FIELDS
from fastdeploy_sd.models.decoder_config import DecoderConfig


class Architecture(NamedTuple):
    """How an architecture's config.json is read, and what it may leave out."""

    read: Callable[[FieldReader], DecoderConfig]
    defaults: Mapping[str, Any] = {}


_ERNIE_DENSE = Architecture(ernie4_5.read_ernie4_5, ernie4_5.DENSE_DEFAULTS)
ARCHITECTURES: Mapping[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(deepseek.read_v2, deepseek.V2_DEFAULTS),
    "DeepseekV3ForCausalLM": Architecture(deepseek.read_v3, deepseek.DEFAULTS),
    "Ernie4_5ForCausalLM": _ERNIE_DENSE,
    "Ernie4_5_ForCausalLM": _ERNIE_DENSE,  # the spelling of the first Paddle releases
    "Ernie4_5_MoeForCausalLM": Architecture(ernie4_5.read_ernie4_5_moe, ernie4_5.MOE_DEFAULTS),
    "Gemma2ForCausalLM": Architecture(gemma.read_gemma2, gemma.GEMMA2_DEFAULTS),
    "Gemma3ForCausalLM": Architecture(gemma.read_gemma3, gemma.GEMMA3_DEFAULTS),
    "Glm4MoeForCausalLM": Architecture(glm4_moe.read_config, glm4_moe.DEFAULTS),
    "GptOssForCausalLM": Architecture(gpt_oss.read_config, gpt_oss.DEFAULTS),
    "GraniteForCausalLM": Architecture(granite.read_config),
    "LlamaForCausalLM": Architecture(llama.read_config),
    "Ministral3ForCausalLM": Architecture(mistral.read_ministral3),
    "MinistralForCausalLM": Architecture(mistral.read_mistral),
    "MistralForCausalLM": Architecture(mistral.read_mistral),
    "Phi3ForCausalLM": Architecture(phi3.read_config),
    "Qwen2ForCausalLM": Architecture(qwen.read_qwen2),
    "Qwen3ForCausalLM": Architecture(qwen.read_qwen3, qwen.QWEN3_DEFAULTS),
    "Qwen3MoeForCausalLM": Architecture(qwen.read_qwen3_moe),
    "Qwen3NextForCausalLM": Architecture(qwen_hybrid.read_moe, qwen_hybrid.DEFAULTS),
    "Qwen3_5ForCausalLM": Architecture(qwen_hybrid.read_dense, qwen_hybrid.DEFAULTS),
    "Qwen3_5ForConditionalGeneration": Architecture(qwen_hybrid.read_dense_wrapper, qwen_hybrid.DEFAULTS),
    "Qwen3_5MoeForCausalLM": Architecture(qwen_hybrid.read_moe, qwen_hybrid.DEFAULTS),
    "Qwen3_5MoeForConditionalGeneration": Architecture(qwen_hybrid.read_moe_wrapper, qwen_hybrid.DEFAULTS),
    "SmolLM3ForCausalLM": Architecture(smollm3.read_config, smollm3.DEFAULTS),
}

# A directory of draft layers names itself so, or as its target.
DRAFT_ARCHITECTURES: Mapping[str, Architecture] = {
    **ARCHITECTURES,
    "Ernie4_5_MTPForCausalLM": Architecture(ernie4_5.read_ernie4_5_mtp, ernie4_5.MOE_DEFAULTS),
}


def read_decoder_config(values: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Turn a checkpoint's config.json into a DecoderConfig; `where` names the file in errors.

    Raises CheckpointError: unknown architecture, or a key is missing, mistyped, out of range or unsupported.
    """
    return _read(values, ARCHITECTURES, where)


def read_draft_config(values: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Turn the config.json of draft layers into a DecoderConfig; raises as read_decoder_config."""
    return _read(values, DRAFT_ARCHITECTURES, where)


def _read(values: Mapping[str, Any], served: Mapping[str, Architecture], where: str) -> DecoderConfig:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    if name not in served:
        # No nearest name: another architecture is another computation, however alike the names are.
        raise CheckpointError(f"{where}: architectures: expected one of {', '.join(served)}, got {shown(names)}")
    architecture = served[name]
    return architecture.read(FieldReader(values, FIELDS, where, architecture.defaults))
