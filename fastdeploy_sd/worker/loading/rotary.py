"""The rotary tables of a model's layers, for the target and the draft layers alike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.rope_config import RopeConfig
from fastdeploy_sd.ops.kv_cache import Rotary
from fastdeploy_sd.ops.rope_table import rope_table

# Cosine and sine of a pair that does not turn, for heads without rotary embedding.
_NO_ANGLE = np.array([1.0, 0.0], np.float32)


def make_rotary(
    config: DecoderConfig, max_tokens: int, max_model_len: int
) -> Mapping[RopeConfig | None, Rotary[Tensor]]:
    """Return the embeddings of positions 0 .. max_tokens - 1, one of each kind of layer.

    The scaling follows from max_model_len, which does not depend on the memory that is left for KV.
    """
    return {rope: _rotary(rope, max_tokens, max_model_len) for rope in config.ropes}


def _rotary(rope: RopeConfig | None, max_tokens: int, max_model_len: int) -> Rotary[Tensor]:
    if rope is None:
        return Rotary(device().wrap(np.tile(_NO_ANGLE, (max_tokens, 1))))
    table = rope_table(max_tokens, rope.rotary_dim, rope.theta, rope.scaling_of_length(max_model_len))
    scaling = rope.query_scaling
    q_scale = None if scaling is None else device().wrap(scaling.factors(max_tokens))
    return Rotary(device().wrap(table), rope.interleaved, q_scale)
