"""EAGLE heads: a decoder layer that guesses tokens from the target's hidden rows, each draft from the one before.

The row at slot q combines token q with the target's row of position q - 1, or with the head's own row of the draft
before. P-EAGLE makes all drafts in one pass: its further rows combine a mask token with a trained row.

Source: arXiv:2401.15077 (EAGLE-1), arXiv:2503.01840 (EAGLE-3).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.drafters.draft_layers import (
    Combine,
    DraftLayer,
    DraftLayers,
    Output,
    normed_output,
)
from fastdeploy_sd.models.drafters.draft_model import CombineHidden, DraftBlock, DraftOutput, TargetParts
from fastdeploy_sd.models.drafters.draft_parts import DraftParts
from fastdeploy_sd.models.drafters.eagle_weights import Eagle3Weights, EagleWeights
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.decoder_layer import ConcatRmsNorm, DecoderLayer, InputNorm, RmsNorm
from fastdeploy_sd.models.layers.linear import ALONE, LinearLayer, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.bf16 import narrow, storage
from fastdeploy_sd.ops.rowwise import cast, concat_columns


def build_eagle(
    target: TargetParts,
    weights: EagleWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> DraftLayers:
    """Build this rank's part of an EAGLE-1 or EAGLE-2 head; what it has not is the target's."""
    parts, fc = DraftParts(target, weights.config, scheme, packer, group), weights.fc()
    assert fc is not None, "a head of this kind always has one"
    builder = parts.builder
    layer = DraftLayer(
        embed=parts.embed(weights.embedding()),
        combine=_projected(builder.projection(fc)),
        blocks=_blocks(builder, weights, _no_norm),
        output=_sum_output(weights.config.hidden_size),
        head=parts.head(weights.head()),
    )
    return DraftLayers([layer], token_map=token_map_of(weights))


def build_eagle3(
    target: TargetParts,
    weights: Eagle3Weights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> DraftLayers:
    """Build this rank's part of an EAGLE-3 head; what it has not is the target's."""
    parts = DraftParts(target, weights.config, scheme, packer, group)
    builder, eps = parts.builder, weights.config.norm_eps
    layer = DraftLayer(
        embed=parts.embed(weights.embedding()),
        combine=_apart,
        blocks=_blocks(builder, weights, _EagleInputNorm(weights)),
        output=normed_output(RmsNorm(weights.output_norm(), eps), feeds_normed=weights.read.feeds_normed),
        head=parts.head(weights.head()),
    )
    return DraftLayers([layer], _combine_hidden(weights, builder), token_map_of(weights), _block(weights, scheme))


def _block(weights: Eagle3Weights, scheme: QuantScheme) -> DraftBlock | None:
    """Return what P-EAGLE's further rows run: the newest token's row makes the first draft."""
    token, hidden = weights.read.mask_token, weights.mask_hidden()
    if token is None or hidden is None:
        return None
    return DraftBlock(token, constant(narrow(hidden, storage(scheme.dtype))), more_rows=-1, is_apart=False)


def _blocks(builder: LayerBuilder, weights: EagleWeights, first: InputNorm) -> list[DecoderLayer]:
    """Return the decoder layers; `first`: the input norm of the first one, as the others are usual ones."""
    others = [builder.layer(weights, layer) for layer in range(1, weights.num_layers)]
    return [builder.layer(weights, 0, input_norm=first), *others]


class _EagleInputNorm:
    """What the first layer of an EAGLE-3 head attends to, [T, 2 * H], of an embedding and a hidden row [T, H]."""

    def __init__(self, weights: Eagle3Weights) -> None:
        eps, hidden_norm = weights.config.norm_eps, weights.hidden_norm(0)
        self._both = ConcatRmsNorm(weights.input_norm(0), hidden_norm, eps)
        self._hidden = RmsNorm(hidden_norm, eps) if weights.read.norm_before_residual else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert residual is not None, "the hidden row"
        begin = residual if self._hidden is None else self._hidden(residual)[0]
        return self._both(x, residual), cast(begin, paddle.float32)


def _no_norm(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    assert residual is None, "the first layer begins the residual stream"
    return x, cast(x, paddle.float32)


def _apart(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return embedded, hidden


def _projected(fc: LinearLayer) -> Combine:
    def combine(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        return fc(concat_columns(embedded, hidden)), None

    return combine


def _sum_output(hidden_size: int) -> Output:
    """Return the output of a layer without a norm: head and next draft read the residual stream."""
    total_of = RmsNorm(np.ones(hidden_size, np.float32), 1.0)

    def output(x: Tensor, residual: Tensor) -> DraftOutput:
        total = cast(total_of(x, residual)[1], x.dtype)
        return DraftOutput(total, total)

    return output


def _combine_hidden(weights: Eagle3Weights, builder: LayerBuilder) -> CombineHidden | None:
    found, eps = weights.fc(), weights.config.norm_eps
    if found is None:
        return None
    fc, whole, each = builder.projection(found), weights.fc_norm(), weights.row_norms()
    norm = None if whole is None else RmsNorm(whole, eps)
    row_norms = None if each is None else [RmsNorm(weight, eps) for weight in each]

    def combine_hidden(rows: Sequence[Tensor]) -> Tensor:
        if row_norms is not None:
            rows = [row_norm(part)[0] for row_norm, part in zip(row_norms, rows, strict=True)]
        side_by_side = functools.reduce(concat_columns, rows)
        return fc(side_by_side if norm is None else norm(side_by_side)[0])

    return combine_hidden


def token_map_of(weights: EagleWeights) -> Tensor | None:
    """Return i32[V of the drafts], see DraftModel.token_map."""
    found = weights.token_map()
    return None if found is None else constant(found)
