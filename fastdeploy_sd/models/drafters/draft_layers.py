"""Draft layers over hidden rows of a target: MTP's, and the layers of EAGLE heads. Knows weights and ops; no requests.

A draft layer embeds a token, combines it with a hidden row of the position before, runs decoder layers, and makes rows
for a head and for the next draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paddle import Tensor

from fastdeploy_sd.models.drafters.draft_model import CombineHidden, DraftBlock, DraftInputs, DraftOutput
from fastdeploy_sd.models.drafters.draft_parts import Embed, Head
from fastdeploy_sd.models.layers.decoder_layer import DecoderLayer, RmsNorm, run_before_last
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.rowwise import cast

# Embedded tokens [T, H], hidden rows [T, H] -> what a decoder layer adds up: [T, *], f32[T, H] or None
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
Output = Callable[[Tensor, Tensor], DraftOutput]  # what decoder layers return -> rows


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayer:
    """One draft layer, of one or several decoder layers; parts may be the target's.

    Attributes:
        feeds_hidden: the next draft reads the hidden rows that this one read.
    """

    embed: Embed
    combine: Combine
    blocks: Sequence[DecoderLayer]
    output: Output
    head: Head
    feeds_hidden: bool = False


class DraftLayers:
    """A DraftModel of layers; `token_map`, `combine_hidden`, `block`: see there."""

    def __init__(
        self,
        layers: list[DraftLayer],
        combine_hidden: CombineHidden | None = None,
        token_map: Tensor | None = None,
        block: DraftBlock | None = None,
    ) -> None:
        self._layers, self.combine_hidden, self.token_map = layers, combine_hidden, token_map
        self.block = block

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        part, caches = self._of(step, rows)
        before = self._before_last(part, caches, rows)
        output = part.output(*part.blocks[-1](*before, caches[-1], rows.maps))
        if not part.feeds_hidden:
            return output
        wanted = rows.maps.outputs
        return output._replace(
            chained=rows.hidden if wanted is None else gather_output_rows(rows.hidden, wanted.indices)
        )

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        part, caches = self._of(step, rows)
        part.blocks[-1].store_kv(*self._before_last(part, caches, rows), caches[-1], rows.maps)

    def logits(self, step: int, normed: Tensor) -> Tensor:
        return self._layers[min(step, self.num_layers - 1)].head(normed)

    def _of(self, step: int, rows: DraftInputs) -> tuple[DraftLayer, Sequence[KvCache[Tensor]]]:
        """Return the layer of a step, and its caches."""
        layer = min(step, self.num_layers - 1)
        count = len(self._layers[layer].blocks)
        return self._layers[layer], rows.caches[layer * count : (layer + 1) * count]

    @staticmethod
    def _before_last(
        part: DraftLayer, caches: Sequence[KvCache[Tensor]], rows: DraftInputs
    ) -> tuple[Tensor, Tensor | None]:
        pair = part.combine(part.embed(rows.input_ids), rows.hidden)
        return run_before_last(part.blocks, *pair, caches, rows.maps)


def normed_output(norm: RmsNorm, *, feeds_normed: bool) -> Output:
    """Return the output of a layer with a norm; `feeds_normed`: the next draft reads its rows after the norm too."""

    def output(x: Tensor, residual: Tensor) -> DraftOutput:
        normed, total = norm(x, residual)
        return DraftOutput(normed, normed if feeds_normed else cast(total, normed.dtype))

    return output
