"""GLM-4.5, 4.6 and 4.7: a part of each head rotates, and DeepSeek's router chooses experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, read_decoder
from fastdeploy_sd.models.deepseek import ROUTER, read_experts

# What a config.json may leave out; the published modelling code's own values.
DEFAULTS: Mapping[str, Any] = {"partial_rotary_factor": 0.5, "norm_topk_prob": True}


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Glm4MoeForCausalLM; raises as read_decoder."""
    reader.require_neutral(ROUTER)
    dense = read_decoder(
        reader,
        reads=("partial_rotary_factor",),
        qkv_bias=reader.boolean("attention_bias"),
        qk_norm=reader.boolean("use_qk_norm"),
    )
    first = reader.integer("first_k_dense_replace")
    return dense.with_experts(read_experts(reader), range(first, dense.num_layers))
