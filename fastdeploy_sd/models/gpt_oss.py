"""gpt-oss: attention with sinks and windows in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig, read_decoder, verify_top_k
from fastdeploy_sd.models.layer_windows import all_but_every, read_windows

# What a config.json may leave out; the published modelling code's own values.
DEFAULTS: Mapping[str, Any] = {"attention_bias": True, "rope_theta": 150000.0, "swiglu_limit": 7.0, "head_dim": 64}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"swiglu_alpha": (1.702,)}
_WINDOW = 128


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of GptOssForCausalLM; raises as read_decoder."""
    reader.require_neutral(_NEUTRAL)
    bias = reader.boolean("attention_bias")
    dense = read_decoder(
        reader,
        find_windows=lambda own, num_layers: read_windows(own, num_layers, all_but_every(2), _WINDOW),
        qkv_bias=bias,
        output_bias=bias,
    )
    num_experts, top_k = reader.integer("num_local_experts"), reader.integer("num_experts_per_tok")
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=verify_top_k(reader, "num_experts_per_tok", top_k, num_experts),
        intermediate_size=reader.integer("intermediate_size"),
        # The softmax over the chosen logits.
        normalize=True,
        biases=True,
        gate_limit=reader.number("swiglu_limit"),
        num_experts_field="num_local_experts",
    )
    sunk = dense.with_attention(lambda _, own: replace(own, sinks=True))
    return sunk.with_experts(moe, range(dense.num_layers))
