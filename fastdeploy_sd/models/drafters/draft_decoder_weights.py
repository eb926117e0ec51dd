"""Opens a whole model, of any served architecture and format, that drafts for another one. Needs no Paddle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.drafter_kind import DRAFT_MODEL, open_drafter
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import resident_bytes
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix, WeightPart
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.shard import Shard


@dataclass(frozen=True, slots=True, eq=False)
class TokenTranslation:
    """What a draft model with another tokenizer reads and drafts in the ids of its target.

    Attributes:
        own: i32[V], its token in place of each of the target's.
        drafted: i32[D], the target's tokens that it has too, ascending; `own` has them.
    """

    own: I32
    drafted: I32


class DraftDecoderWeights:
    """DraftWeights of a whole model; it reads token ids only.

    Attributes:
        own_config: of the model itself; `config` has the ids that it takes.
        translation: None = it has the target's tokens.
    """

    drafts_at_once = False

    def __init__(self, checkpoint: ModelSource, config: DecoderConfig) -> None:
        self.checkpoint, self.config, self.num_layers = checkpoint, config, config.num_layers
        self.own_config = config
        self.translation: TokenTranslation | None = None

    def translate(self, translation: TokenTranslation) -> None:
        """Take and give ids of the target from now on."""
        self.translation = translation
        self.config = replace(self.config, vocab_size=len(translation.own))

    @property
    def reads(self) -> tuple[int, ...]:
        return ()

    def verify(self, num_steps: int) -> None:
        """See DraftWeights: all layers make every draft."""
        DecoderWeights(self.checkpoint, self.own_config).verify()

    def num_kv_layers(self, num_steps: int) -> int:
        return self.num_layers

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        """See DraftWeights; the model has a head of its own in any case."""
        return resident_bytes(self.config, scheme if head is None else replace(scheme, lm_head=head), shard)

    def decoder_weights(self, vocab_size: int) -> DecoderWeights:
        """Return the weights by role, for a target with so many token ids: its head has no rows for others."""
        if self.translation is not None:
            return _TranslatedWeights(self.checkpoint, self.own_config, self.translation)
        return _FirstTokens(self.checkpoint, self.own_config, vocab_size)


class _FirstTokens(DecoderWeights):
    """Has logits for the first ids only."""

    def __init__(self, source: ModelSource, config: DecoderConfig, num_tokens: int) -> None:
        super().__init__(source, config)
        self._num_tokens = num_tokens

    def lm_head(self) -> WeightMatrix:
        return super().lm_head().rows([range(min(self._num_tokens, self._config.vocab_size))])


class _TranslatedWeights(DecoderWeights):
    """Has the embedding's rows in the order of the target's ids, and logits for the tokens of both."""

    def __init__(self, source: ModelSource, config: DecoderConfig, translation: TokenTranslation) -> None:
        super().__init__(source, config)
        self._plain = DecoderWeights(source, config)
        self._own, self._drafted = translation.own, translation.own[translation.drafted]

    def verify(self) -> None:
        self._plain.verify()  # looks up the tensors without putting rows into order

    def embedding(self) -> WeightPart:
        return _rows(WeightMatrix((self._plain.embedding(),)), self._own)

    def lm_head(self) -> WeightMatrix:
        return WeightMatrix((_rows(self._plain.lm_head(), self._drafted),))


def _rows(matrix: WeightMatrix, rows: I32) -> FloatPart:
    """Return some rows; their place says which, as packed weights are kept by it."""
    digest = hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
    return FloatPart(matrix.parts[0].name, matrix.to_array()[rows], place=f"[{digest}]")


def open_draft_decoder(target: ModelSource, target_config: DecoderConfig, place: str | None) -> DraftDecoderWeights:
    """Return the weights of the model in `place`, a folder or a GGUF file; not read yet.

    Raises:
        ConfigError: no place is given, another drafter is there, or a model with recurrent states.
        CheckpointError: there is no model of a served architecture.
    """
    checkpoint = open_drafter(place, DRAFT_MODEL)
    config = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    if config.delta_nets:
        wanted = "a draft model without recurrent states (config.json: linear_num_value_heads)"
        raise ConfigError(
            f"speculative_config.model: expected {wanted}, got one in {checkpoint.path}", param="speculative_config"
        )
    return DraftDecoderWeights(checkpoint, config)
