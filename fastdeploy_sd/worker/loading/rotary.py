"""The rotary table of a model, for the target and the draft layers alike."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.kv_cache import Rotary
from fastdeploy_sd.ops.rope_table import rope_table


def make_rotary(config: DecoderConfig, max_tokens: int) -> Rotary[Tensor]:
    """Return the configured embedding of positions 0 .. max_tokens - 1."""
    table = rope_table(max_tokens, config.layers[0].attention.head_dim, config.rope_theta, config.rope_scaling)
    return Rotary(device().wrap(table), config.rope_interleaved)
