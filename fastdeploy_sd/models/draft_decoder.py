"""A whole model as the DraftModel of another one: all of its layers are one draft layer, which reads token ids only."""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor

from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.draft_decoder_weights import DraftDecoderWeights
from fastdeploy_sd.models.draft_model import DraftOutput, TargetParts
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.types import I32


class DraftDecoder:
    """A DraftModel with one draft layer, whose hidden rows have no width."""

    num_layers = 1

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def forward(
        self,
        layer: int,
        input_ids: Tensor | I32,
        hidden: Tensor,
        caches: Sequence[KvCache[Tensor]],
        inputs: AttentionInputs,
    ) -> DraftOutput:
        normed = self._decoder.forward(input_ids, caches, inputs)
        return DraftOutput(
            normed, hidden if inputs.outputs is None else gather_output_rows(hidden, inputs.outputs.indices)
        )

    def store_kv(
        self,
        layer: int,
        input_ids: Tensor | I32,
        hidden: Tensor,
        caches: Sequence[KvCache[Tensor]],
        inputs: AttentionInputs,
    ) -> None:
        self._decoder.store_kv(input_ids, caches, inputs)

    def logits(self, layer: int, normed: Tensor) -> Tensor:
        return self._decoder.logits(normed)


def build_draft_decoder(
    target: TargetParts,
    weights: DraftDecoderWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> DraftDecoder:
    """Build this rank's part of the model; its head has no rows for ids that the target has not."""
    vocab_size = min(weights.config.vocab_size, target.decoder.config.vocab_size)
    return DraftDecoder(Decoder(weights.checkpoint, weights.config, scheme, packer, group, vocab_size))
