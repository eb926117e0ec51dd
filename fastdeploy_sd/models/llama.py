"""Llama: NeoX rotary layout, optional llama3 scaling, untied or tied head."""

from __future__ import annotations

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, read_decoder


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of LlamaForCausalLM; raises as read_decoder."""
    bias = reader.boolean("attention_bias")
    return read_decoder(reader, mlp_bias=reader.boolean("mlp_bias"), qkv_bias=bias, output_bias=bias)
