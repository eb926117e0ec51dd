"""Gemma 2 and 3, text: norms around attention and feed-forward network, GEGLU, windows in most layers."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, read_decoder
from fastdeploy_sd.models.layer_windows import (
    FULL,
    SLIDING,
    IsWindowed,
    all_but_every,
    read_windowed,
    read_windows,
)
from fastdeploy_sd.models.rope_config import RopeConfig, read_rope

# What a config.json may leave out; the published modelling code's own values.
GEMMA2_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA3_DEFAULTS = {**GEMMA2_DEFAULTS, "rope_theta": 1000000.0}
_WINDOW, _GEMMA2_PATTERN, _GEMMA3_PATTERN = 4096, 2, 6
_ACTIVATIONS = ("gelu_pytorch_tanh",)
_NEUTRAL = {"hidden_activation": _ACTIVATIONS, "use_bidirectional_attention": (False,)}


def read_gemma2(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Gemma2ForCausalLM; raises as read_decoder."""
    softcap = reader.optional_number("attn_logit_softcapping", 50.0)
    decoder = _read(reader, all_but_every(_GEMMA2_PATTERN), qk_norm=False)
    capped = decoder.with_attention(lambda _, own: replace(own, softcap=softcap))
    return replace(capped, logits_cap=reader.optional_number("final_logit_softcapping", 30.0))


def read_gemma3(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Gemma3ForCausalLM; raises as read_decoder."""
    reader.require_neutral({"attn_logit_softcapping": ()})
    is_windowed = all_but_every(reader.integer("sliding_window_pattern", _GEMMA3_PATTERN))
    decoder = _read(reader, is_windowed, qk_norm=True)
    windowed, local = read_windowed(reader, decoder.num_layers, is_windowed), _local_rope(reader, decoder)
    turned = decoder.with_attention(lambda i, own: replace(own, rope=local) if windowed[i] else own)
    return replace(turned, logits_cap=reader.optional_number("final_logit_softcapping"))


def _local_rope(reader: FieldReader, decoder: DecoderConfig) -> RopeConfig:
    """Return the rotary embedding of layers with a window."""
    head_dim, theta = decoder.attentions[0].head_dim, reader.number("rope_local_base_freq")
    parameters = reader.values.get("rope_parameters")
    if isinstance(parameters, dict) and SLIDING in parameters:
        return read_rope(reader, decoder.max_position, head_dim, layer_type=SLIDING)
    return RopeConfig(theta, head_dim)


def _read(reader: FieldReader, is_windowed: IsWindowed, *, qk_norm: bool) -> DecoderConfig:
    reader.require_neutral(_NEUTRAL)
    bias = reader.boolean("attention_bias")
    decoder = read_decoder(
        reader, _ACTIVATIONS, "gelu_tanh", reads=("attn_logit_softcapping", "final_logit_softcapping"),
        layer_type=FULL, find_windows=functools.partial(read_windows, is_windowed=is_windowed, default=_WINDOW),
        qkv_bias=bias, output_bias=bias, qk_norm=qk_norm,
    )  # fmt: skip
    scale = reader.number("query_pre_attn_scalar") ** -0.5
    decoder = decoder.with_attention(lambda _, own: replace(own, scale=scale))
    decoder = decoder.with_layers(lambda _, layer: replace(layer, output_norms=True))
    offset = reader.number("rms_norm_offset")
    return replace(decoder, norm_offset=offset, embedding_scale=math.sqrt(decoder.hidden_size))
