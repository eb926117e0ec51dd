"""Qwen2, Qwen3 and Qwen3-MoE: NeoX rotary layout; Qwen2 has q/k/v biases, Qwen3 normalises q and k heads."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig, read_decoder, verify_top_k

# What a config.json of Qwen3ForCausalLM may leave out; the published modelling code's own value.
QWEN3_DEFAULTS = {"head_dim": 128}


def read_qwen2(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen2ForCausalLM; raises as read_decoder."""
    return read_decoder(reader, qkv_bias=True)


def read_qwen3(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen3ForCausalLM; raises as read_decoder."""
    bias = reader.boolean("attention_bias")
    return read_decoder(reader, qkv_bias=bias, output_bias=bias, qk_norm=True)


def read_qwen3_moe(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Qwen3MoeForCausalLM; raises as read_decoder."""
    return read_experts(reader, read_qwen3(reader))


def read_experts(
    reader: FieldReader, dense: DecoderConfig, change: Callable[[MoeConfig], MoeConfig] = lambda moe: moe
) -> DecoderConfig:
    """Return a decoder with the experts that config.json tells of, as `change` makes them; raises as read_decoder."""
    step, without = reader.integer("decoder_sparse_step"), set(_layer_numbers(reader))
    num_experts = reader.integer("num_experts", reader.integer("num_local_experts"))
    layers = [i for i in range(dense.num_layers) if i not in without and step > 0 and (i + 1) % step == 0]
    if num_experts == 0 or not layers:
        return dense
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=verify_top_k(reader, "num_experts_per_tok", reader.integer("num_experts_per_tok"), num_experts),
        intermediate_size=reader.integer("moe_intermediate_size"),
        normalize=reader.boolean("norm_topk_prob"),
        num_experts_field="num_experts" if reader.values.get("num_experts") is not None else "num_local_experts",
    )
    return dense.with_experts(change(moe), layers)


def _layer_numbers(reader: FieldReader) -> list[int]:
    value = reader.values.get("mlp_only_layers")
    numbers = [] if value is None else value
    if not isinstance(numbers, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in numbers):
        raise reader.error("mlp_only_layers", "a list of layer numbers", value)
    return numbers
