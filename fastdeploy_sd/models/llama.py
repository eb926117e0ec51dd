"""Llama, Mistral and models of that shape: NeoX rotary layout, optional biases, untied or tied head."""

from __future__ import annotations

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, read_decoder


def read_config(reader: FieldReader, reads: tuple[str, ...] = ()) -> DecoderConfig:
    """Read config.json of LlamaForCausalLM; `reads` and errors as read_decoder."""
    bias = reader.boolean("attention_bias")
    return read_decoder(reader, reads=reads, mlp_bias=reader.boolean("mlp_bias"), qkv_bias=bias, output_bias=bias)
