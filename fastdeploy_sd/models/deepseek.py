"""DeepSeek-V3, R1, V3.1 and Kimi-K2, and models of DeepSeek-V2's shapes: latent attention, and DeepSeek's routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastdeploy_sd.models.attention_config import (
    HEAD_DIM_MULTIPLE,
    MAX_LATENT_DIM,
    MAX_LATENT_HEADS,
    LatentAttentionConfig,
)
from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig, read_decoder, verify_top_k
from fastdeploy_sd.models.rope_config import read_rope, score_factor

# What a config.json may leave out; the published modelling code's own values.
DEFAULTS: Mapping[str, Any] = {"norm_topk_prob": True, "first_k_dense_replace": 3}
V2_DEFAULTS: Mapping[str, Any] = {"norm_topk_prob": False, "first_k_dense_replace": 0}
# Of the router that chooses by sigmoids and a bias.
ROUTER: Mapping[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_V2_ROUTER: Mapping[str, tuple[object, ...]] = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    # With it the published code leaves out the factor of the weights.
    "norm_topk_prob": (False,),
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"attention_bias": (False,), "moe_layer_freq": (1,), "ep_size": (1,)}
# The published code adds it to the sum of the chosen scores.
_NORM_MIN = 1e-20


def read_v3(reader: FieldReader) -> DecoderConfig:
    """Read config.json of DeepseekV3ForCausalLM; raises as read_decoder."""
    reader.require_neutral(ROUTER)
    return _read(reader, read_experts(reader))


def read_v2(reader: FieldReader) -> DecoderConfig:
    """Read config.json of DeepseekV2ForCausalLM, whose router has no groups; raises as read_decoder."""
    reader.require_neutral(_V2_ROUTER)
    moe = read_experts(reader)
    # Greedy choice: groups only spread experts over machines.
    return _read(reader, replace(moe, sigmoid=False, selection_bias=False, num_groups=1, num_chosen_groups=1))


def _read(reader: FieldReader, moe: MoeConfig) -> DecoderConfig:
    reader.require_neutral(_NEUTRAL)
    dense = read_decoder(reader, read_attention=_read_attention)
    return dense.with_experts(moe, range(reader.integer("first_k_dense_replace"), dense.num_layers))


def _read_attention(reader: FieldReader, max_position: int) -> LatentAttentionConfig:
    num_heads, rotary_dim = reader.integer("num_attention_heads"), reader.integer("qk_rope_head_dim")
    if num_heads > MAX_LATENT_HEADS:
        raise reader.error(
            "num_attention_heads", f"at most {MAX_LATENT_HEADS}, which read one latent vector", num_heads
        )
    if (num_kv_heads := reader.integer("num_key_value_heads", num_heads)) != num_heads:
        raise reader.error("num_key_value_heads", f"as many as num_attention_heads ({num_heads})", num_kv_heads)
    if rotary_dim % 2 != 0:
        raise reader.error("qk_rope_head_dim", "an even number", rotary_dim)
    latent_dim = reader.integer("kv_lora_rank")
    kept = latent_dim + rotary_dim
    if kept > MAX_LATENT_DIM or kept % HEAD_DIM_MULTIPLE != 0:
        most = f"a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_LATENT_DIM} together with qk_rope_head_dim ({rotary_dim})"
        raise reader.error("kv_lora_rank", most, latent_dim)
    key_dim = reader.integer("qk_nope_head_dim")
    rope = replace(read_rope(reader, max_position, rotary_dim), interleaved=reader.boolean("rope_interleave"))
    return LatentAttentionConfig(
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=reader.integer("v_head_dim"),
        latent_dim=latent_dim,
        query_latent_dim=reader.optional_integer("q_lora_rank"),
        rope=rope,
        scale=(key_dim + rotary_dim) ** -0.5 * score_factor(reader, rope),
    )


def read_experts(reader: FieldReader) -> MoeConfig:
    """Read the experts under DeepSeek's names; raises CheckpointError: a router that cannot be."""
    num_experts, top_k = reader.integer("n_routed_experts"), reader.integer("num_experts_per_tok")
    num_groups, chosen = reader.integer("n_group"), reader.integer("topk_group")
    size = reader.integer("moe_intermediate_size")
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        expected = f"one that makes groups of two or more of the {num_experts} experts"
        raise reader.error("n_group", expected, num_groups)
    if chosen > num_groups:
        raise reader.error("topk_group", f"at most the {num_groups} groups there are", chosen)
    return MoeConfig(
        num_experts=num_experts,
        top_k=verify_top_k(reader, "num_experts_per_tok", top_k, num_experts // num_groups * chosen),
        intermediate_size=size,
        shared_intermediate_size=size * reader.integer("n_shared_experts"),
        normalize=reader.boolean("norm_topk_prob"),
        norm_min=_NORM_MIN,
        scale=reader.number("routed_scaling_factor"),
        sigmoid=True,
        selection_bias=True,
        num_groups=num_groups,
        num_chosen_groups=chosen,
        num_experts_field="n_routed_experts",
    )
