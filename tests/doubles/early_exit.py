"""A draft model that is not MTP: the target's first layer and its head, without the layers between."""

from __future__ import annotations

from dataclasses import replace

from paddle import Tensor

from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import (
    FINAL_NORM,
    CombineHidden,
    DraftBlock,
    DraftInputs,
    DraftOutput,
    DraftWeights,
    TargetParts,
)
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.decoder_layer import DecoderLayer
from fastdeploy_sd.models.layers.linear import TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weight_bytes import layer_bytes
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types import DraftSource
from fastdeploy_sd.types.draft_methods import DraftMethod
from fastdeploy_sd.types.shard import Shard

EARLY_EXIT = DraftMethod(
    "early_exit",
    ".model_based.proposer:ModelProposer",
    DraftSource.CUSTOM,
    draft_weights="tests.doubles.early_exit:EarlyExitWeights",
    draft_model="tests.doubles.early_exit:build_early_exit",
    reads_hidden=True,
    auto_key="auto_with_mtp",
)


class EarlyExitWeights:
    """DraftWeights in the target's own checkpoint."""

    num_layers, drafts_at_once = 1, False
    reads = (FINAL_NORM,)

    def __init__(self, target: Checkpoint, target_config: DecoderConfig, directory: str | None) -> None:
        self.checkpoint, self.config = target, replace(target_config, layers=target_config.layers[:1])

    def verify(self, num_steps: int) -> None:
        """The target is verified by itself."""

    def num_kv_layers(self, num_steps: int) -> int:
        return 1

    def num_bytes(self, scheme: QuantScheme, num_steps: int, head: LinearFormat | None, shard: Shard) -> int:
        return layer_bytes(self.config, scheme, self.config.layers[0], shard)


class EarlyExit:
    """DraftModel of that layer. It is run as one that reads hidden rows."""

    num_layers = 1
    token_map: Tensor | None = None
    combine_hidden: CombineHidden | None = None
    block: DraftBlock | None = None

    def __init__(self, target: Decoder, layer: DecoderLayer) -> None:
        self._target, self._layer = target, layer

    def forward(self, step: int, rows: DraftInputs) -> DraftOutput:
        normed, _ = self._target.final_norm(
            *self._layer(self._target.embed(rows.input_ids), None, rows.caches[0], rows.maps)
        )
        return DraftOutput(normed, normed)

    def store_kv(self, step: int, rows: DraftInputs) -> None:
        self._layer.store_kv(self._target.embed(rows.input_ids), None, rows.caches[0], rows.maps)

    def logits(self, step: int, normed: Tensor) -> Tensor:
        return self._target.logits(normed)


def build_early_exit(
    target: TargetParts,
    weights: DraftWeights,
    scheme: QuantScheme,
    packer: WeightPacker,
    num_steps: int,
    group: TpGroup,
) -> EarlyExit:
    builder = LayerBuilder(weights.config, scheme, packer, group)
    return EarlyExit(target.decoder, builder.layer(target.weights, 0))
