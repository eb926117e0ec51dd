"""Llama: NeoX rotary layout, optional llama3 scaling, untied or tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.models.decoder_config import ConfigReader, DecoderConfig, read_common


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json of LlamaForCausalLM.

    Raises:
        CheckpointError: a key is missing, mistyped, or asks for something unsupported.
    """
    reader = ConfigReader(values)
    bias = reader.boolean("attention_bias")
    return DecoderConfig(**read_common(reader), qkv_bias=bias, output_bias=bias, mlp_bias=reader.boolean("mlp_bias"))
