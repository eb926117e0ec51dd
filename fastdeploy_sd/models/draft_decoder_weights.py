"""Opens a whole model, of any served architecture and format, that drafts for another one. Needs no Paddle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import resident_bytes
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types.shard import Shard

_PARAM = "speculative_config"


class DraftDecoderWeights:
    """DraftWeights of a whole model; it reads token ids only."""

    def __init__(self, checkpoint: ModelSource, config: DecoderConfig) -> None:
        self.checkpoint, self.config, self.num_layers = checkpoint, config, config.num_layers

    @property
    def reads(self) -> tuple[str, ...]:
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

    Raises ConfigError: no place is given; CheckpointError: there is no model of a served architecture.
    """
    if place is None or not Path(place).is_dir():
        got = "nothing" if place is None else repr(place)
        raise ConfigError(
            f"{_PARAM}.model: expected the folder, GGUF file or hub name of a draft model, got {got}", param=_PARAM
        )
    checkpoint = Checkpoint(Path(place))
    return DraftDecoderWeights(checkpoint, read_decoder_config(checkpoint.config, str(checkpoint.config_path)))
