"""Multi-token prediction: draft layers that guess the token after next from the target's hidden rows.

A layer computes block(projection(norm(embedding of token q) | norm(hidden row of position q - 1))) and, after an output
norm, the target's head or its own makes logits for position q + 1. Knows weights and ops; knows no requests.

Source: arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder import Embedding
from fastdeploy_sd.models.draft_model import DraftInputs, DraftOutput, TargetParts
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.decoder_layer import ConcatRmsNorm, DecoderLayer, RmsNorm
from fastdeploy_sd.models.layers.linear import ALONE, LinearLayer, TpGroup
from fastdeploy_sd.models.mtp_weights import MtpWeights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.rowwise import cast
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types import I32

Embed = Callable[[Tensor | I32], Tensor]  # i32[T] token ids -> [T, H]
Head = Callable[[Tensor], Tensor]  # normed rows [A, H] -> logits f32[A, V]


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

    def forward(self, layer: int, rows: DraftInputs) -> DraftOutput:
        x, residual = self._layers[layer].block(self._combine(layer, rows), None, rows.caches[layer], rows.maps)
        normed, total = self._layers[layer].output_norm(x, residual)
        return DraftOutput(normed, normed if self._feeds_normed else cast(total, normed.dtype))

    def store_kv(self, layer: int, rows: DraftInputs) -> None:
        self._layers[layer].block.store_kv(self._combine(layer, rows), None, rows.caches[layer], rows.maps)

    def _combine(self, layer: int, rows: DraftInputs) -> Tensor:
        part = self._layers[layer]
        return part.projection(part.input_norm(part.embed(rows.input_ids), rows.hidden))

    def logits(self, layer: int, normed: Tensor) -> Tensor:
        return self._layers[layer].head(normed)


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
        self._target, self._weights, self._scheme, self._packer = target, weights, scheme, packer
        self._builder = LayerBuilder(weights.config, scheme, packer, group)
        self._target_builder = LayerBuilder(target.decoder.config, scheme, target.packer, group)

    def layer(self, j: int) -> MtpLayer:
        w, eps = self._weights, self._weights.config.norm_eps
        output_norm = w.output_norm(j)
        return MtpLayer(
            embed=self._embed(w.embedding(j)),
            input_norm=ConcatRmsNorm(w.embedding_norm(j), w.hidden_norm(j), eps),
            projection=self._builder.projection(w.projection(j)),
            block=self._builder.layer(w, j),
            output_norm=self._target.decoder.final_norm if output_norm is None else RmsNorm(output_norm, eps),
            head=self._head(w.head(j)),
        )

    def _embed(self, own: FloatPart | None) -> Embed:
        if own is None or _is_same(own.data, self._target.weights.embedding().data):
            return self._target.decoder.embed
        return Embedding(own, self._scheme, self._packer)

    def _head(self, own: WeightMatrix | None) -> Head:
        if own is None or _is_same(own.to_array(), self._target.weights.lm_head().to_array()):
            return self._shared_head
        return _head_of(self._builder.head(own, self._scheme.lm_head))

    @functools.cached_property
    def _shared_head(self) -> Head:
        target = self._target
        if target.head_format == target.decoder.lm_head_format:
            return target.decoder.logits
        return _head_of(self._target_builder.head(target.weights.lm_head(), target.head_format))


def _head_of(linear: LinearLayer) -> Head:
    return lambda hidden: linear(hidden, paddle.float32)


def _is_same(a: Weights, b: Weights) -> bool:
    """Whether two matrices hold the same values in the same type; bfloat16 bits never equal float32 values."""
    return a.dtype == b.dtype and np.array_equal(a, b)
