"""Finds the draft layers that a configuration needs. Reads their names and shapes only, and needs no Paddle."""

from __future__ import annotations

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.mtp_weights import MtpWeights, open_mtp_weights, verify_num_steps


def open_draft_weights(config: Config, target: Checkpoint, target_config: DecoderConfig) -> MtpWeights | None:
    """Find the draft layers that the configured method needs, without reading them; None where it needs none.

    Raises:
        ConfigError: there are no such weights, or too few layers for `num_model_steps`.
        CheckpointError: they are malformed, or do not fit the target.
    """
    speculative = config.speculative
    if not speculative.uses_draft_layers:
        return None
    weights = open_mtp_weights(target, target_config, speculative.model)
    verify_num_steps(weights, speculative.num_model_steps)
    weights.verify(speculative.num_model_steps)
    return weights
