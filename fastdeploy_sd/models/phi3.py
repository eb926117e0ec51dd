"""Phi-3 and Phi-4: fused projections, heads that may rotate in part, other rotary factors for long contexts."""

from __future__ import annotations

import functools

from fastdeploy_sd.models.checkpoint.fields import FieldReader
from fastdeploy_sd.models.decoder_config import DecoderConfig, read_decoder
from fastdeploy_sd.models.layer_windows import every_layer, read_windows


def read_config(reader: FieldReader) -> DecoderConfig:
    """Read config.json of Phi3ForCausalLM; raises as read_decoder."""
    find_windows = functools.partial(read_windows, is_windowed=every_layer)
    return read_decoder(reader, reads=("partial_rotary_factor",), find_windows=find_windows)
