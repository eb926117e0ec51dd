"""Opens a whole model, of any served architecture and format, that drafts for another one. Needs no Paddle."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafter_kind import DRAFT_MODEL, open_drafter
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import resident_bytes
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types.shard import Shard


class DraftDecoderWeights:
    """DraftWeights of a whole model; it reads token ids only."""

    def __init__(self, checkpoint: ModelSource, config: DecoderConfig) -> None:
        self.checkpoint, self.config, self.num_layers = checkpoint, config, config.num_layers

    @property
    def reads(self) -> tuple[int, ...]:
        return ()

    def verify(self, num_steps: int) -> None:
        """See DraftWeights: all layers make every draft."""
        DecoderWeights(self.checkpoint, self.config).verify()

    def num_kv_layers(self, num_steps: int) -> int:
        return self.num_layers

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        """See DraftWeights; the model has a head of its own in any case."""
        return resident_bytes(self.config, scheme if head is None else replace(scheme, lm_head=head), shard)


def open_draft_decoder(target: ModelSource, target_config: DecoderConfig, place: str | None) -> DraftDecoderWeights:
    """Return the weights of the model in `place`, a folder or a GGUF file; not read yet.

    Raises ConfigError: no place is given, or another drafter is there; CheckpointError: there is no model of a served
    architecture.
    """
    checkpoint = open_drafter(place, DRAFT_MODEL)
    return DraftDecoderWeights(checkpoint, read_decoder_config(checkpoint.config, str(checkpoint.config_path)))
