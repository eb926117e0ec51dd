"""DFlash: layers that draft a block of tokens in one pass, whose rows see each other, whichever comes first.

What they remember of the text follows from the target's rows alone: the keys and values at slot q are projections of
its row of position q - 1, the same row in every layer.

    slots   0      1 ............ n - 1    n          n + 1 ...
            empty  rows of the target      token n-1  mask tokens, each row drafts the token of its place

Source: z-lab/dflash.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.drafters.dflash_weights import DFlashWeights
from fastdeploy_sd.models.drafters.draft_model import (
    CombineHidden,
    DraftBlock,
    DraftInputs,
    DraftOutput,
    TargetParts,
)
from fastdeploy_sd.models.drafters.draft_parts import DraftParts, Embed, Head
from fastdeploy_sd.models.drafters.eagle import token_map_of
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.decoder_layer import DecoderLayer, RmsNorm
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.batch import gather_output_rows, row_requests
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.rowwise import concat_columns


class DFlash:
    """A DraftModel that makes all drafts in one pass.

    `in_order`: of each layer, whether a row sees only rows of its block that come before it.
    """

    num_layers = 1

    def __init__(  # noqa: PLR0913, PLR0917 (its parts)
        self,
        embed: Embed,
        layers: Sequence[DecoderLayer],
        in_order: Sequence[bool],
        norm: RmsNorm,
        head: Head,
        combine_hidden: CombineHidden,
        token_map: Tensor | None,
        block: DraftBlock,
    ) -> None:
        self._embed, self._layers, self._in_order, self._norm, self._head = embed, layers, in_order, norm, head
        self.combine_hidden: CombineHidden | None = combine_hidden
        self.token_map = token_map
        self.block: DraftBlock | None = block

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        maps = replace(rows.maps, outputs=None)
        both = _seeing_all(maps)
        x, residual = self._embed(rows.input_ids), None
        for layer, cache, in_order in zip(self._layers, rows.caches, self._in_order, strict=True):
            x, residual = layer(x, residual, cache, maps if in_order else both)
        normed, _ = self._norm(x, residual)
        assert rows.maps.outputs is not None, "not every row of a block makes a draft"
        drafting = gather_output_rows(normed, rows.maps.outputs.indices)
        return DraftOutput(drafting, drafting)

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        for layer, cache in zip(self._layers, rows.caches, strict=True):
            layer.store_kv_of(rows.hidden, cache, rows.maps)

    def logits(self, step: int, normed: Tensor) -> Tensor:
        return self._head(normed)


def build_dflash(
    target: TargetParts,
    weights: DFlashWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup = ALONE,
) -> DFlash:
    """Build this rank's part of a DFlash drafter; what it has not is the target's."""
    parts, read = DraftParts(target, weights.config, scheme, packer, group), weights.block
    assert read.mask_token is not None, "drafters of this kind have one"
    no_row = constant(np.zeros(weights.config.hidden_size, storage(scheme.dtype)))  # a block reads none
    windows = [attention.window for attention in weights.config.attentions]
    return DFlash(
        embed=parts.embed(weights.embedding()),
        layers=[parts.builder.layer(weights, layer) for layer in range(weights.num_layers)],
        in_order=[window is not None and not read.sees_all_in_window for window in windows],
        norm=RmsNorm(weights.output_norm(), weights.config.norm_eps),
        head=parts.head(weights.head()),
        combine_hidden=_combine_hidden(weights, parts.builder),
        token_map=token_map_of(weights),
        block=DraftBlock(read.mask_token, no_row, more_rows=int(not read.has_draft_of_newest), is_apart=True),
    )


def _seeing_all(maps: AttentionInputs) -> AttentionInputs:
    """Return the maps with every row as a request of its own that is as long as the row's."""
    starts, lens, blocks = row_requests(maps.query_start_loc, maps.seq_lens, maps.blocks, maps.positions.shape[0])
    return replace(maps, query_start_loc=starts, seq_lens=lens, blocks=blocks)


def _combine_hidden(weights: DFlashWeights, builder: LayerBuilder) -> CombineHidden:
    fc, norm = builder.projection(weights.fc()), RmsNorm(weights.hidden_norm(), weights.config.norm_eps)

    def combine_hidden(rows: Sequence[Tensor]) -> Tensor:
        normed, _ = norm(fc(functools.reduce(concat_columns, rows)))
        return normed

    return combine_hidden
