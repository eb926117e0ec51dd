"""Multi-token prediction: draft layers that guess the token after next from the target's hidden rows.

A layer computes block(projection(norm(embedding of token q) | norm(hidden row of position q - 1))) and, after an output
norm, the target's head or its own makes logits for position q + 1. An only layer reads its own output after that norm
in the next step: drafts of released models are accepted more often than with the rows before it. config.json may say
otherwise, see MtpRows.

Source: arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.models.drafters.draft_layers import Combine, DraftLayer, DraftLayers, normed_output
from fastdeploy_sd.models.drafters.draft_model import TargetParts
from fastdeploy_sd.models.drafters.draft_parts import DraftParts
from fastdeploy_sd.models.drafters.mtp_weights import MtpRows, MtpWeights
from fastdeploy_sd.models.layers.decoder_layer import ConcatRmsNorm, RmsNorm
from fastdeploy_sd.models.layers.linear import ALONE, LinearLayer, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker


def build_mtp_model(
    target: TargetParts,
    weights: MtpWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> DraftLayers:
    """Build this rank's part of the draft layers that `num_steps` steps use; what is the same is shared."""
    parts = DraftParts(target, weights.config, scheme, packer, group)
    builder, eps = parts.builder, weights.config.norm_eps

    def layer(j: int) -> DraftLayer:
        norm = weights.output_norm(j)
        output_norm = target.decoder.final_norm if norm is None else RmsNorm(norm, eps)
        input_norm = ConcatRmsNorm(weights.embedding_norm(j), weights.hidden_norm(j), eps)
        return DraftLayer(
            embed=parts.embed(weights.embedding(j)),
            combine=_projected(input_norm, builder.projection(weights.projection(j))),
            blocks=(builder.layer(weights, j),),
            output=normed_output(output_norm, feeds_normed=weights.refeed is MtpRows.POST_NORM),
            feeds_hidden=weights.refeed is MtpRows.TARGET,
            head=parts.head(weights.head(j)),
        )

    return DraftLayers([layer(j) for j in range(weights.num_kv_layers(num_steps))])


def _projected(input_norm: ConcatRmsNorm, projection: LinearLayer) -> Combine:
    def combine(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        return projection(input_norm(embedded, hidden)), None

    return combine
