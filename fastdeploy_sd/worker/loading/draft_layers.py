"""Loads a server's draft layers and gives them KV: what the worker has besides the target when it drafts by model."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.layers.tp_group import ALONE, TpGroup
from fastdeploy_sd.models.mtp import MtpModel, TargetParts, build_mtp_model
from fastdeploy_sd.models.mtp_weights import MtpWeights
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.worker.loading.draft_formats import draft_scheme


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayers:
    """The draft layers of a server and the configuration of their decoder layers."""

    model: MtpModel
    config: DecoderConfig


def load_draft_layers(
    config: Config, target: TargetParts, weights: MtpWeights, packer: WeightPacker, group: TpGroup = ALONE
) -> DraftLayers:
    """Load this rank's part of what `open_draft_weights` found; `packer` is of the checkpoint they are in.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    model = build_mtp_model(target, weights, draft_scheme(config), packer, config.speculative.num_model_steps, group)
    return DraftLayers(model, weights.config)
