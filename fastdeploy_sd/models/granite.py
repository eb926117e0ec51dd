"""Granite 3 and 4 without experts: Llama with multipliers of embedding, scores, residual additions and logits."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.models import llama
from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.config_fields import GRANITE_MULTIPLIERS
from fastdeploy_sd.models.decoder_config import DecoderConfig


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of GraniteForCausalLM; raises as read_decoder."""
    embedding, attention, residual, logits = map(reader.number, GRANITE_MULTIPLIERS)
    decoder = llama.read_config(reader, GRANITE_MULTIPLIERS)
    scaled = decoder.with_attention(lambda _, own: replace(own, scale=attention))
    return replace(scaled, embedding_scale=embedding, residual_scale=residual, logits_scale=1 / logits)
