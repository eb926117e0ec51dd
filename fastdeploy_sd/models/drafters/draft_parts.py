"""The embedding and the head of a draft model: its own, or the target's where the checkpoint has none or the same."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder import Embedding
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import TargetParts
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.linear import LinearLayer, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.weight_matrix import WeightMatrix, WeightPart
from fastdeploy_sd.types import I32

Embed = Callable[[Tensor | I32], Tensor]  # i32[T] token ids -> [T, H]
Head = Callable[[Tensor], Tensor]  # normed rows [A, H] -> logits f32[A, V]


class DraftParts:
    """Builds both on this rank.

    Attributes:
        builder: of the draft model's own layers.
    """

    def __init__(
        self, target: TargetParts, config: DecoderConfig, scheme: QuantScheme, packer: WeightPacker, group: TpGroup
    ) -> None:
        self._target, self._scheme, self._packer = target, scheme, packer
        self.builder = LayerBuilder(config, scheme, packer, group)
        self._target_builder = LayerBuilder(target.decoder.config, scheme, target.packer, group)

    def embed(self, own: WeightPart | None) -> Embed:
        """Return the embedding of a table [V, H]; None = there is none."""
        parts = () if own is None else (own, self._target.weights.embedding())
        if own is None or _is_same(*(WeightMatrix((part,)).to_array() for part in parts)):
            return self._target.decoder.embed
        return Embedding(own, self._scheme, self._packer)

    def head(self, own: WeightMatrix | None, bias: Weights | None = None) -> Head:
        """Return the head of a matrix [V, H]; None = there is none. One with a bias f32[V] is never the target's."""
        if own is None or (bias is None and _is_same(own.to_array(), self._target.weights.lm_head().to_array())):
            return self._shared_head
        return _head_of(self.builder.head(own, self._scheme.lm_head, bias))

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
