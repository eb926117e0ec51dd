"""ERNIE 4.5, dense and mixture of experts: interleaved rotary layout, experts chosen with a selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.models.decoder_config import ConfigReader, DecoderConfig, MoeConfig, read_common


def _read_dense(reader: ConfigReader) -> dict[str, Any]:
    bias = reader.boolean("use_bias")
    flags = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, "rope_interleaved": True}
    return read_common(reader) | flags


def read_ernie4_5(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of Ernie4_5ForCausalLM.

    Raises:
        CheckpointError: a key is missing, mistyped, or asks for something unsupported.
    """
    return DecoderConfig(**_read_dense(ConfigReader(values)))


def read_ernie4_5_mtp(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of Ernie4_5_MTPForCausalLM, the draft layers of either; raises as read_ernie4_5."""
    return read_ernie4_5_moe(values) if "moe_num_experts" in values else read_ernie4_5(values)


def read_ernie4_5_moe(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of Ernie4_5_MoeForCausalLM; raises as read_ernie4_5."""
    reader = ConfigReader(values)
    common = _read_dense(reader)
    last = common["num_layers"] - 1
    first_moe, interval = reader.integer("moe_layer_start_index", 0), max(reader.integer("moe_layer_interval", 1), 1)
    last_moe = values.get("moe_layer_end_index", last)
    last_moe = last if last_moe in (None, -1) else reader.integer("moe_layer_end_index", last)
    expert_size = reader.integer("moe_intermediate_size")
    layers = [i for i in range(common["num_layers"]) if (i + 1) % interval == 0 and first_moe <= i <= last_moe]
    moe = MoeConfig(
        num_experts=reader.integer("moe_num_experts"),
        top_k=reader.integer("moe_k"),
        intermediate_size=expert_size,
        layers=frozenset(layers),
        shared_intermediate_size=expert_size * reader.integer("moe_num_shared_experts", 0),
        norm_min=reader.number("moe_norm_min", 1e-12),
        selection_bias=reader.boolean("moe_use_aux_free", True),
    )
    return DecoderConfig(**common, moe=moe)
