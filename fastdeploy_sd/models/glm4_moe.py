"""GLM-4.5, 4.6 and 4.7: a part of each head rotates, and DeepSeek's router chooses experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig, read_decoder, verify_top_k

# What a config.json may leave out; the published modelling code's own values.
DEFAULTS: Mapping[str, Any] = {"partial_rotary_factor": 0.5, "norm_topk_prob": True}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
# The published code adds it to the sum of the chosen scores.
_NORM_MIN = 1e-20


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Glm4MoeForCausalLM; raises as read_decoder."""
    reader.require_neutral(_NEUTRAL)
    dense = read_decoder(
        reader,
        reads=("partial_rotary_factor",),
        qkv_bias=reader.boolean("attention_bias"),
        qk_norm=reader.boolean("use_qk_norm"),
    )
    first = reader.integer("first_k_dense_replace")
    return dense.with_experts(read_experts(reader), range(first, dense.num_layers))


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
