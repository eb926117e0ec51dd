"""A whole model as the DraftModel of another one: all of its layers are one draft layer, which reads token ids only."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.drafters.draft_decoder_weights import DraftDecoderWeights
from fastdeploy_sd.models.drafters.draft_model import CombineHidden, DraftBlock, DraftInputs, DraftOutput, TargetParts
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.batch import gather_output_rows


class DraftDecoder:
    """A DraftModel with one draft layer, whose hidden rows have no width."""

    num_layers = 1
    combine_hidden: CombineHidden | None = None
    block: DraftBlock | None = None

    def __init__(self, decoder: Decoder, token_map: Tensor | None) -> None:
        self._decoder, self.token_map = decoder, token_map

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        normed, outputs = self._decoder.forward(rows.input_ids, rows.caches, rows.maps), rows.maps.outputs
        return DraftOutput(normed, rows.hidden if outputs is None else gather_output_rows(rows.hidden, outputs.indices))

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        self._decoder.store_kv(rows.input_ids, rows.caches, rows.maps)

    def logits(self, step: int, normed: Tensor) -> Tensor:
        return self._decoder.logits(normed)


def build_draft_decoder(
    target: TargetParts,
    weights: DraftDecoderWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> DraftDecoder:
    """Build this rank's part of the model."""
    own = weights.decoder_weights(target.decoder.config.vocab_size)
    token_map = None if weights.translation is None else constant(weights.translation.drafted)
    return DraftDecoder(Decoder(weights.checkpoint, weights.own_config, scheme, packer, group, own), token_map)
