"""Builds the target and the draft layers of a server from their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.config import Config
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.mtp_weights import MtpWeights
from fastdeploy_sd.models.packed_cache import packed_matrices
from fastdeploy_sd.models.weight_packer import WeightPacker
from fastdeploy_sd.quantization.scheme import QuantScheme
from fastdeploy_sd.worker.draft_layers import DraftLayers, draft_scheme, load_draft_layers


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The target and, where the server drafts by model, its draft layers."""

    decoder: Decoder
    draft: DraftLayers | None


def load_model(
    config: Config, checkpoint: Checkpoint, decoder_config: DecoderConfig, draft_weights: MtpWeights | None
) -> LoadedModel:
    """Pack the weights and build the layers over them.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ConfigError: the folder of packed weights cannot be created.
    """
    folder = config.model.packed_weights_folder
    scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
    with packed_matrices(folder, checkpoint, scheme, "target") as store:
        decoder = Decoder(checkpoint, decoder_config, scheme, WeightPacker(checkpoint, store))
    if draft_weights is None:
        return LoadedModel(decoder, None)
    source = draft_weights.checkpoint
    with packed_matrices(folder, source, draft_scheme(config), "draft") as store:
        draft = load_draft_layers(config, checkpoint, decoder, draft_weights, WeightPacker(source, store))
    return LoadedModel(decoder, draft)
