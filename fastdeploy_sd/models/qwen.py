"""Qwen2, Qwen3 and Qwen3-MoE: NeoX rotary layout; Qwen2 has q/k/v biases, Qwen3 normalises q and k heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.models.decoder_config import ConfigReader, DecoderConfig, MoeConfig, read_common


def read_qwen2(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of Qwen2ForCausalLM.

    Raises:
        CheckpointError: a key is missing, mistyped, or asks for something unsupported.
    """
    reader = ConfigReader(values)
    reader.require("use_sliding_window", False, False)
    return DecoderConfig(**read_common(reader), qkv_bias=True)


def read_qwen3(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of Qwen3ForCausalLM; raises as read_qwen2."""
    reader = ConfigReader(values)
    reader.require("use_sliding_window", False, False)
    bias = reader.boolean("attention_bias")
    return DecoderConfig(**read_common(reader), qkv_bias=bias, output_bias=bias, qk_norm=True)


def read_qwen3_moe(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of Qwen3MoeForCausalLM; raises as read_qwen2."""
    reader = ConfigReader(values)
    reader.require("use_sliding_window", False, False)
    common = read_common(reader)
    step, dense = reader.integer("decoder_sparse_step", 1), set(reader.integers("mlp_only_layers"))
    num_experts = reader.integer("num_experts", reader.integer("num_local_experts", 0))
    layers = [i for i in range(common["num_layers"]) if i not in dense and step > 0 and (i + 1) % step == 0]
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        layers=frozenset(layers if num_experts > 0 else ()),
        normalize=reader.boolean("norm_topk_prob"),
    )
    bias = reader.boolean("attention_bias")
    return DecoderConfig(**common, qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe)
