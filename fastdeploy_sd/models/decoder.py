"""A decoder-only transformer over packed weights: every served architecture is this class with another config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.checkpoint import Checkpoint, Weights
from fastdeploy_sd.layers.attention import Attention, AttentionInputs
from fastdeploy_sd.layers.linear import Linear
from fastdeploy_sd.layers.mlp import FeedForward, MoeMlp, Router, SwigluMlp
from fastdeploy_sd.layers.norm import RmsNorm
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import attention_slices, feed_forward_slices
from fastdeploy_sd.models.weight_packer import WeightPacker
from fastdeploy_sd.models.weights import DecoderWeights, LayerWeights, expert_parts
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm
from fastdeploy_sd.ops.packing import PackedExperts
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.parallel.ranges import WHOLE, SliceRule
from fastdeploy_sd.runtime.device import DEVICE
from fastdeploy_sd.types import I32

_ROWS_AT_ONCE = 1024


class DecoderLayer:
    """h += attention(norm(h)); h += feed_forward(norm(h)); the additions happen inside the norms."""

    def __init__(
        self, input_norm: RmsNorm, attention: Attention, post_attention_norm: RmsNorm, feed_forward: FeedForward
    ) -> None:
        self._input_norm, self._attention = input_norm, attention
        self._post_attention_norm, self._feed_forward = post_attention_norm, feed_forward

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: KvCache[Tensor], inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] still to be added to residual f32[T, H] (None: x is the embedding) -> the same pair.

        Where `inputs.outputs` names the wanted rows, the result has only those.
        """
        x, residual = self._input_norm(x, residual)
        x = self._attention(x, cache, inputs)
        if inputs.outputs is not None:
            residual = gather_output_rows(residual, inputs.outputs.indices)
        x, residual = self._post_attention_norm(x, residual)
        return self._feed_forward(x), residual

    def store_kv(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> None:
        """Only write the KV of x [T, H], which begins the residual stream."""
        normed, _ = self._input_norm(x)
        self._attention.store_kv(normed, cache, inputs)


class Embedding:
    """Token ids to rows of a table, in the model's dtype."""

    def __init__(self, table: Weights, scheme: QuantScheme) -> None:
        dtype = np.dtype(np.float32 if scheme.dtype == "float32" else np.uint16)
        # In the checkpoint's own type it stays in the mapped file: a step touches a few rows of it.
        self._table = DEVICE.wrap(table if table.dtype == dtype else _convert(table, dtype))

    def __call__(self, input_ids: Tensor | I32) -> Tensor:
        """i32[T] -> [T, H]."""
        return gather_output_rows(self._table, input_ids)


def _convert(table: Weights, dtype: np.dtype[np.generic]) -> Weights:
    """Return a table in another type; some rows at a time, as converting makes several copies of what it is given."""
    converted = np.empty(table.shape, dtype)
    for begin in range(0, len(table), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        converted[rows] = narrow(widen(table[rows]), dtype)
    return converted


class Decoder:
    """Token ids to hidden rows, hidden rows to logits.

    Attributes:
        config: the architecture.
        dtype: "float32" or "bfloat16", of the activations.
        final_norm: before the head; draft layers may share it.
        lm_head_format: what the head is stored as.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: DecoderConfig, scheme: QuantScheme, packer: WeightPacker | None = None
    ) -> None:
        """Load; `packer` is the checkpoint's, None = one that packs everything."""
        self.config, self.dtype = config, scheme.dtype
        weights = DecoderWeights(checkpoint, config)
        weights.verify()
        packer = WeightPacker(checkpoint) if packer is None else packer
        builder = LayerBuilder(weights, config, scheme, packer)
        self._embedding = Embedding(weights.embedding(), scheme)
        self._layers = [builder.layer(i) for i in range(config.num_layers)]
        self.final_norm = RmsNorm(weights.final_norm(), config.norm_eps)
        self.lm_head_format = scheme.lm_head
        self._lm_head = Linear(packer.linear(weights.lm_head(), scheme.lm_head), None)

    def forward(self, input_ids: Tensor | I32, caches: Sequence[KvCache[Tensor]], inputs: AttentionInputs) -> Tensor:
        """Run the step's tokens and store their KV.

        Args:
            input_ids: i32[T].
            caches: one per layer.

        Returns:
            hidden rows after the final norm [T, H], in the model's dtype.
        """
        x, residual = self._embedding(input_ids), None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, cache, inputs)
        hidden, _ = self.final_norm(x, residual)
        return hidden

    def embed(self, input_ids: Tensor | I32) -> Tensor:
        """i32[T] -> [T, H] in the model's dtype."""
        return self._embedding(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, H] -> f32[L, V]."""
        return self._lm_head(hidden, paddle.float32)


class LayerBuilder:
    """Turns checkpoint weights into layers."""

    def __init__(self, weights: LayerWeights, config: DecoderConfig, scheme: QuantScheme, packer: WeightPacker) -> None:
        self._weights, self._config, self._scheme, self._packer = weights, config, scheme, packer

    def layer(self, i: int) -> DecoderLayer:
        """Build layer i; raises CheckpointError as the weights do."""
        w, eps = self._weights, self._config.norm_eps
        norms = w.qk_norms(i)
        qk_norm = None
        if norms is not None:
            qk_norm = QkNorm(paddle.to_tensor(norms[0]), paddle.to_tensor(norms[1]), eps)
        output = self.linear(w.output(i), attention_slices(self._config))
        attention = Attention(self.linear(w.qkv(i)), output, self._config.head_dim, qk_norm)
        return DecoderLayer(
            RmsNorm(w.input_norm(i), eps), attention, RmsNorm(w.post_attention_norm(i), eps), self._feed_forward(i)
        )

    def linear(self, weight_and_bias: tuple[WeightMatrix, Weights | None], slices: SliceRule = WHOLE) -> Linear:
        """Build a linear layer in the format of attention and dense feed-forward layers; `slices` cut its sums."""
        weight, bias = weight_and_bias
        return Linear(self._packer.linear(weight, self._scheme.linear, slices), bias)

    def _feed_forward(self, i: int) -> FeedForward:
        moe = self._config.moe
        if moe is None or i not in moe.layers:
            return self._dense(i, "mlp", self._config.intermediate_size)
        shared = None
        if moe.shared_intermediate_size > 0:
            shared = self._dense(i, "mlp.shared_experts", moe.shared_intermediate_size)
        weight, bias = self._weights.router(i, moe)
        selection_bias = None if bias is None else paddle.to_tensor(bias)
        router = Router(paddle.to_tensor(weight), selection_bias, moe.top_k, moe.normalize, moe.norm_min)
        return MoeMlp(router, *self._experts(i, moe), shared)

    def _dense(self, i: int, part: str, size: int) -> SwigluMlp:
        gate_up = self.linear(self._weights.gate_up(i, part, size))
        return SwigluMlp(gate_up, self.linear(self._weights.down(i, part, size), feed_forward_slices(size)))

    def _experts(self, i: int, moe: MoeConfig) -> tuple[PackedExperts[Tensor], PackedExperts[Tensor]]:
        parts = expert_parts(moe)
        gate_up = [self._weights.gate_up(i, part, moe.intermediate_size)[0] for part in parts]
        down = [self._weights.down(i, part, moe.intermediate_size)[0] for part in parts]
        return self._packer.experts(gate_up, self._scheme.experts), self._packer.experts(down, self._scheme.experts)
