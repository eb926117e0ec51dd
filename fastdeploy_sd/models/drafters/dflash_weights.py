"""Finds the weights of a DFlash block drafter by role. Needs no Paddle.

Source, for names and layouts: z-lab/dflash, vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.dflash_config import DFlashConfig, read_dflash
from fastdeploy_sd.models.drafters.drafter_kind import open_drafter
from fastdeploy_sd.models.drafters.eagle_weights import EagleWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix

_PARAM = "speculative_config"


class DFlashWeights(EagleWeights):
    """DraftWeights of a DFlash drafter, by role; raises as LayerWeights."""

    _noun = "a DFlash drafter"

    def __init__(self, checkpoint: ModelSource, read: DFlashConfig) -> None:
        super().__init__(checkpoint, read)
        self.block = read

    def verify(self, num_steps: int) -> None:
        """See DraftWeights."""
        if num_steps > self.block.num_drafts:
            raise ConfigError(
                f"{_PARAM}.num_speculative_tokens, num_model_steps: expected at most {self.block.num_drafts}, the"
                f" drafts of a block of {self.checkpoint.path}, got {num_steps}",
                param=_PARAM,
            )
        super().verify(num_steps)

    def input_norms(self, layer: int) -> Sequence[Callable[[int], Weights]]:
        return (self.input_norm,)

    def fc(self) -> tuple[WeightMatrix, Weights | None]:
        """Return [H, A * H] over the rows of A layers, and its bias f32[H] or None."""
        return self._fc(len(self.reads) * self.read.target_size)

    def hidden_norm(self) -> Weights:
        """Return f32[H], the norm of what `fc` returns."""
        return self._norm_weight(self._name("hidden_norm"), self.config.hidden_size)

    def output_norm(self) -> Weights:
        """Return f32[H]."""
        return self._norm_weight(self._name("norm"), self.config.hidden_size)

    def embedding(self) -> FloatPart | None:
        """Return [V, H], or None for the target's table."""
        return self._table()

    def _look_ups(self) -> Sequence[Callable[[], object]]:
        return *super()._look_ups(), self.hidden_norm, self.output_norm


def open_dflash(target: ModelSource, target_config: DecoderConfig, place: str | None) -> DFlashWeights:
    """Open the DFlash drafter in a folder; raises as open_drafter and read_dflash."""
    checkpoint = open_drafter(place, "dflash")
    return DFlashWeights(checkpoint, read_dflash(checkpoint, target_config))
