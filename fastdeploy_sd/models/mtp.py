"""Multi-token prediction: draft layers that guess the token after next from the target's hidden rows.

A layer computes block(projection(norm(embedding of token q) | norm(hidden row of position q - 1))) and, after an output
norm, the target's head or its own makes logits for position q + 1. Knows weights and ops; knows no requests.

Source: arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from paddle import Tensor

from fastdeploy_sd.models.draft_model import DraftInputs, DraftOutput, TargetParts
from fastdeploy_sd.models.draft_parts import DraftParts, Embed, Head
from fastdeploy_sd.models.layers.decoder_layer import ConcatRmsNorm, DecoderLayer, RmsNorm
from fastdeploy_sd.models.layers.linear import ALONE, LinearLayer, TpGroup
from fastdeploy_sd.models.mtp_weights import MtpWeights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.rowwise import cast


@dataclass(frozen=True, slots=True, eq=False)
class MtpLayer:
    """One draft layer; parts may be the target's."""

    embed: Embed
    input_norm: ConcatRmsNorm
    projection: LinearLayer
    block: DecoderLayer
    output_norm: RmsNorm
    head: Head


class MtpModel:
    """A DraftModel of the MTP layers of one checkpoint; `feeds_normed`: see MtpWeights."""

    def __init__(self, layers: list[MtpLayer], *, feeds_normed: bool) -> None:
        self._layers, self._feeds_normed = layers, feeds_normed

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        layer = self._layer(step)
        part = self._layers[layer]
        x, residual = part.block(self._combine(part, rows), None, rows.caches[layer], rows.maps)
        normed, total = part.output_norm(x, residual)
        return DraftOutput(normed, normed if self._feeds_normed else cast(total, normed.dtype))

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        layer = self._layer(step)
        part = self._layers[layer]
        part.block.store_kv(self._combine(part, rows), None, rows.caches[layer], rows.maps)

    def logits(self, step: int, normed: Tensor) -> Tensor:
        return self._layers[self._layer(step)].head(normed)

    def _layer(self, step: int) -> int:
        return min(step, len(self._layers) - 1)

    @staticmethod
    def _combine(part: MtpLayer, rows: DraftInputs) -> Tensor:
        return part.projection(part.input_norm(part.embed(rows.input_ids), rows.hidden))


def build_mtp_model(
    target: TargetParts,
    weights: MtpWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> MtpModel:
    """Build this rank's part of the draft layers that `num_steps` steps use; what is the same is shared."""
    builder = _MtpBuilder(target, weights, scheme, packer, group)
    return MtpModel(
        [builder.layer(j) for j in range(weights.num_kv_layers(num_steps))], feeds_normed=weights.feeds_normed
    )


class _MtpBuilder:
    """Turns MTP weights into layers."""

    def __init__(
        self, target: TargetParts, weights: MtpWeights, scheme: QuantScheme, packer: WeightPacker, group: TpGroup
    ) -> None:
        self._target, self._weights = target, weights
        self._parts = DraftParts(target, weights.config, scheme, packer, group)

    def layer(self, j: int) -> MtpLayer:
        w, eps = self._weights, self._weights.config.norm_eps
        output_norm = w.output_norm(j)
        return MtpLayer(
            embed=self._parts.embed(w.embedding(j)),
            input_norm=ConcatRmsNorm(w.embedding_norm(j), w.hidden_norm(j), eps),
            projection=self._parts.builder.projection(w.projection(j)),
            block=self._parts.builder.layer(w, j),
            output_norm=self._target.decoder.final_norm if output_norm is None else RmsNorm(output_norm, eps),
            head=self._parts.head(w.head(j)),
        )
