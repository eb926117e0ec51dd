"""Finds the weights of an MLP speculator by role. Knows names and shapes, not heads.

Source, for names and layouts: foundation-model-stack/fms-extras.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.checkpoint.fields import Boolean, Field, FieldReader, Integer
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.drafter_kind import open_drafter
from fastdeploy_sd.models.drafters.heads.weights import HeadsWeights, Linear, prefix_of
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.weight_matrix import FloatPart

_MLP_FIELDS: Mapping[str, Field] = {
    "n_predict": Integer(1, 64),
    "inner_dim": Integer(0, 1 << 24, 0),
    "emb_dim": Integer(1, 1 << 24),
    "tie_weights": Boolean(),
    "scale_input": Boolean(),
}
_NORM_PARTS = ("weight", "bias")


class MlpSpeculatorWeights(HeadsWeights):
    """Heads of an MLP speculator: a recurrent state that takes in token after token.

    Attributes:
        scales_input: the target's row is normalised first.
        token_scale: what embedded tokens are multiplied by before the state is added.
    """

    def __init__(self, checkpoint: ModelSource, target: DecoderConfig) -> None:
        reader = FieldReader(checkpoint.config, _MLP_FIELDS, str(checkpoint.config_path))
        width = reader.integer("inner_dim") or reader.integer("emb_dim", target.hidden_size)
        super().__init__(checkpoint, target, reader.integer("n_predict"), width)
        self.scales_input, self._is_tied = reader.boolean("scale_input"), reader.boolean("tie_weights")
        self._prefix = prefix_of(checkpoint, "speculator.")
        # The weight of the state in the sum keeps half of its square over all heads.
        state_weight = 0.5 ** (0.5 / self.num_heads)
        self.token_scale = math.sqrt((1 - state_weight**2) * width / 2) / state_weight

    def linears(self, i: int) -> list[Linear]:
        columns = self.width if i else self._hidden_size
        return [self._linear(self._name("proj", i, 1), self.width, columns)]

    def head(self, i: int) -> Linear | None:
        return self._output((self._name("head", i),))

    def embedding(self, i: int) -> FloatPart | None:
        name = f"{self._name('emb', i)}.weight"
        return FloatPart(name, self.checkpoint.tensor(name, (self.config.vocab_size, self.width)))

    def norm(self, i: int) -> tuple[Weights, Weights]:
        """Return weights and bias f32[width]."""
        weight, bias = (self.checkpoint.tensor(f"{self._name('ln', i)}.{part}", (self.width,)) for part in _NORM_PARTS)
        return widen(weight), widen(bias)

    def verify(self, num_steps: int) -> None:
        super().verify(num_steps)
        for i in range(num_steps):
            self.norm(i)

    def _name(self, part: str, i: int, num_own: int = 0) -> str:
        """Return the name of a part of head i; of tied heads only the first `num_own` + 1 have one of their own."""
        return f"{self._prefix}{part}.{min(i, num_own) if self._is_tied else i}"


def open_mlp_speculator(target: ModelSource, target_config: DecoderConfig, place: str | None) -> MlpSpeculatorWeights:
    """Return the MLP speculator in a folder; raises as open_drafter; CheckpointError: it does not fit."""
    return MlpSpeculatorWeights(open_drafter(place, "mlp_speculator"), target_config)
