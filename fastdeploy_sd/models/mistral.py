"""Mistral and Ministral: NeoX rotary layout; windows in the oldest releases, queries that grow in Ministral 3."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, Field, FieldReader, Integer, Number
from fastdeploy_sd.models.decoder_config import DecoderConfig, read_decoder
from fastdeploy_sd.models.layer_windows import every_layer, read_windows
from fastdeploy_sd.ops.rope_table import QueryScaling

_WINDOW = 4096  # of a file without the key
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_QUERY_FIELDS: Mapping[str, Field] = {_BETA: Number(0, 1e3), _ORIGINAL: Integer(1, MAX_I32)}


def read_mistral(reader: FieldReader) -> DecoderConfig:
    """Read config.json of MistralForCausalLM and MinistralForCausalLM; raises as read_decoder."""
    return read_decoder(reader, find_windows=functools.partial(read_windows, is_windowed=every_layer, default=_WINDOW))


def read_ministral3(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Ministral3ForCausalLM; raises as read_decoder."""
    key = "rope_parameters" if reader.values.get("rope_parameters") else "rope_scaling"
    parameters = reader.values.get(key)
    if not isinstance(parameters, Mapping) or parameters.get(_BETA) is None:
        return read_mistral(reader)
    # The context is there a second time.
    others = {name: value for name, value in parameters.items() if name not in (_BETA, "max_position_embeddings")}
    decoder = read_mistral(reader.replaced(**{key: others}))
    own = FieldReader(parameters, _QUERY_FIELDS, f"{reader.where}: {key}")
    scaling = QueryScaling(own.number(_BETA), own.integer(_ORIGINAL))

    def scaled(_: int, attention: AttentionConfig) -> AttentionConfig:
        assert attention.rope is not None
        return replace(attention, rope=replace(attention.rope, query_scaling=scaling))

    return decoder.with_attention(scaled)
