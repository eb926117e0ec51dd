"""What a draft model is to those who load and run it, whichever method it is of: weights, KV layers, a forward pass.

`types.draft_methods` names the functions of each method that open its weights and build its model. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.shard import Shard

if TYPE_CHECKING:
    from paddle import Tensor

    from fastdeploy_sd.models.decoder import Decoder
    from fastdeploy_sd.models.layers.attention import AttentionInputs
    from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
    from fastdeploy_sd.models.weights.packer import WeightPacker

# Of the target's hidden rows: those after its final norm. Others are a layer's number: the residual stream that enters
# the layer; the number of layers: the stream after the last one.
FINAL_NORM = -1


CombineHidden = Callable[[Sequence["Tensor"]], "Tensor"]


class DraftWeights(Protocol):
    """The weights of a draft model: found, and not read yet. The checkpoint may be the target's.

    Attributes:
        reads: the target's hidden rows that it reads besides token ids, see FINAL_NORM; () = none.
        drafts_at_once: all drafts are made in one pass.
    """

    checkpoint: ModelSource
    config: DecoderConfig
    num_layers: int

    @property
    def drafts_at_once(self) -> bool: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    def verify(self, num_steps: int) -> None:
        """Check that the layers of so many drafts are there.

        Raises ConfigError: there are too few layers; CheckpointError: a tensor is missing or has another shape.
        """
        ...

    def num_kv_layers(self, num_steps: int) -> int:
        """Return how many layers with a KV cache make so many drafts; 0 = only the newest hidden row is read."""
        ...

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        """Return the bytes of the matrices that a rank has of these layers; head: of its own copy, None = no copy."""
        ...


class DraftInputs(NamedTuple):
    """What a draft layer reads.

    Attributes:
        input_ids: i32[n], the token of every row; on the host or a tensor.
        hidden: [n, H], the hidden row of the position before it.
        caches: of all layers.
    """

    input_ids: Tensor | I32
    hidden: Tensor
    caches: Sequence[KvCache[Tensor]]
    maps: AttentionInputs


class DraftOutput(NamedTuple):
    """A draft layer's output rows [n, H]: after the output norm, for the head; and what the next draft step reads."""

    normed: Tensor
    chained: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftBlock:
    """What the rows of further drafts run, where a model makes all drafts in one pass; see MaskedRows.

    Attributes:
        hidden: [H].
        more_rows: of a request besides one for each draft.
        is_apart: they begin with a row of the newest token, and run after the other rows, whose KV alone is stored.
    """

    token: int
    hidden: Tensor
    more_rows: int
    is_apart: bool


class DraftModel(Protocol):
    """Layers that draft, on this rank. Draft i is made in step i, by layer i or by the only one.

    With a `block` the only layer makes all drafts in step 0.

    A whole model counts as one layer, which has several caches and reads no hidden rows. A chain of heads counts as one
    layer too, which has another head in every step.

    Attributes:
        token_map: i32[V], the target's token of each of its logits; None = it has the same number.
        combine_hidden: makes the rows [T, H] that it is given of the target's that it reads, [T, H of the target] each,
            in their order; None = it reads one row as it is.
    """

    token_map: Tensor | None
    combine_hidden: CombineHidden | None
    block: DraftBlock | None

    @property
    def num_layers(self) -> int: ...

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        """Run the layer of one step over n rows and store their KV."""
        ...

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        """Only store the KV of that layer."""
        ...

    def logits(self, step: int, normed: Tensor) -> Tensor:
        """normed [n, H] -> f32[n, V]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """What draft layers take from the target where they have no part of their own.

    The format of their head may differ: drafts need not be exact, and the head is most of what a pass reads.
    """

    decoder: Decoder
    weights: DecoderWeights
    packer: WeightPacker
    head_format: LinearFormat
