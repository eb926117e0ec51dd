"""SmolLM3: Llama with layers whose heads do not rotate."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.models import llama
from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig

# What a config.json may leave out; the published modelling code's own values.
DEFAULTS = {"rope_theta": 2000000.0, "tie_word_embeddings": True}


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of SmolLM3ForCausalLM; raises as read_decoder."""
    reader.require_neutral({"use_sliding_window": (False,)})
    decoder = llama.read_config(reader)
    rotates = _rotating_layers(reader, decoder.num_layers)
    return decoder.with_attention(lambda i, own: own if rotates[i] else replace(own, rope=None))


def _rotating_layers(reader: FieldReader, num_layers: int) -> list[bool]:
    """Return whether each layer rotates; the misnamed `no_rope_layers` says 1 where one does."""
    value, interval = reader.values.get("no_rope_layers"), reader.integer("no_rope_layer_interval")
    if value is None:
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(value, list) or len(value) != num_layers or any(flag not in (0, 1) for flag in value):
        raise reader.error("no_rope_layers", f"a list of 0 or 1 for each of the {num_layers} layers", value)
    return [flag == 1 for flag in value]
