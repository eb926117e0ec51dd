"""ERNIE 4.5, dense and mixture of experts: interleaved rotary layout, experts chosen with a selection bias.

Keys of training alone, such as losses and parallelism, say nothing about what a model computes, and are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy_sd.models.checkpoint.fields import FieldReader, is_token_id
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig, read_decoder, verify_top_k

# What a config.json may leave out; the published modelling code's own values.
MOE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 500000.0, "tie_word_embeddings": True}
DENSE_DEFAULTS: Mapping[str, Any] = {**MOE_DEFAULTS, "head_dim": 128}
# "swiglu" is what Paddle calls SiLU that is multiplied by the other half.
_ACTIVATIONS = ("silu", "swiglu")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "cachekv_quant": (False,),
    "compression_ratio": (1.0,),
    "remove_tail_layer": (False, 0),
    "rope_3d": (False,),
    "rope_reorder": (False,),
    "scale_qk_coeff": (1.0,),
    "use_3d_rope": (False,),
    "use_rmsnorm": (True,),
}
_MOE_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # The gates differ in how they spread tokens over machines while training.
    "moe_gate": ("topk", "topk_fused", "top2", "top2_fused"),
    "moe_gate_act": ("softmax",),
    "moe_gate_scale": (False,),
    "moe_group_experts": (False,),
    "moe_use_hard_gate": (False,),
    "scoring_func": ("softmax",),
    # With biases in the head and the shared experts, but none in the routed ones, it has never been released.
    "use_bias": (False,),
}


def read_ernie4_5(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Ernie4_5ForCausalLM; raises as read_decoder."""
    reader.require_neutral({"moe_num_experts": (0,)})
    return _read_dense(reader)


def read_ernie4_5_mtp(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Ernie4_5_MTPForCausalLM, the draft layers of either; raises as read_decoder."""
    return (read_ernie4_5 if reader.values.get("moe_num_experts") is None else read_ernie4_5_moe)(reader)


def read_ernie4_5_moe(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Ernie4_5_MoeForCausalLM; raises as read_decoder."""
    reader.require_neutral(_MOE_NEUTRAL)
    dense = _read_dense(reader)
    first, last = _moe_layers(reader, dense.num_layers)
    interval, expert_size = reader.integer("moe_layer_interval"), reader.integer("moe_intermediate_size")
    num_experts = reader.integer("moe_num_experts")
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=verify_top_k(reader, "moe_k", reader.integer("moe_k"), num_experts),
        intermediate_size=expert_size,
        shared_intermediate_size=expert_size * reader.integer("moe_num_shared_experts"),
        normalize=reader.boolean("moe_norm_gate_logits"),
        norm_min=reader.number("moe_norm_min"),
        selection_bias=reader.boolean("moe_use_aux_free"),
        num_experts_field="moe_num_experts",
    )
    return dense.with_experts(moe, [i for i in range(first, last + 1) if (i + 1) % interval == 0])


def _read_dense(reader: FieldReader) -> DecoderConfig:
    reader.require_neutral(_NEUTRAL)
    bias = reader.boolean("use_bias")
    return read_decoder(reader, _ACTIVATIONS, mlp_bias=bias, rope_interleaved=True, qkv_bias=bias, output_bias=bias)


def _moe_layers(reader: FieldReader, num_layers: int) -> tuple[int, int]:
    """Return the first and the last layer that may have experts."""
    first = _layer_number(reader, "moe_layer_start_index", min)
    last = _layer_number(reader, "moe_layer_end_index", max)
    return first or 0, num_layers - 1 if last is None else min(last, num_layers - 1)


def _layer_number(reader: FieldReader, name: str, choose: Callable[[list[int]], int]) -> int | None:
    """Return a layer's number, None where -1 or no key leaves it open. Releases for text and pictures have several."""
    value = reader.values.get(name)
    if value in (None, -1):
        return None
    numbers: list[Any] = value if isinstance(value, list) and value else [value]
    if not all(map(is_token_id, numbers)):
        raise reader.error(name, "a layer number, or a list of them", value)
    return choose(numbers)
