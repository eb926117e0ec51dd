"""Loads a server's draft layers and gives them KV: what the worker has besides the target when it drafts by model."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.config import Config
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.mtp import MtpModel, build_mtp_model, verify_num_steps
from fastdeploy_sd.models.mtp_weights import MtpWeights, open_mtp_weights
from fastdeploy_sd.models.weight_packer import WeightPacker
from fastdeploy_sd.quantization.scheme import QuantScheme


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayers:
    """The draft layers of a server and the configuration of their decoder layers."""

    model: MtpModel
    config: DecoderConfig


def open_draft_weights(config: Config, target: Checkpoint, target_config: DecoderConfig) -> MtpWeights | None:
    """Find the draft layers that the configured method needs, without reading them; None where it needs none.

    Raises:
        ConfigError: there are no such weights, or too few layers for `num_model_steps`.
        CheckpointError: they are malformed, or do not fit the target.
    """
    wish = config.speculative
    if wish.method != "mtp":
        return None
    weights = open_mtp_weights(target, target_config, wish.model)
    verify_num_steps(weights, wish.num_model_steps)
    return weights


def draft_scheme(config: Config) -> QuantScheme:
    """Return how the draft layers' own weights are stored."""
    wish = config.speculative.quantization
    quantization = config.model.quantization if wish is None else wish
    return QuantScheme.create(config.model.dtype, None if quantization == "none" else quantization)


def load_draft_layers(
    config: Config, target: Checkpoint, decoder: Decoder, weights: MtpWeights, packer: WeightPacker
) -> DraftLayers:
    """Load what `open_draft_weights` found; `packer` is of the checkpoint they are in.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    model = build_mtp_model(decoder, target, weights, draft_scheme(config), packer, config.speculative.num_model_steps)
    return DraftLayers(model, weights.config)
