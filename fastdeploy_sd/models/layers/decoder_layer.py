"""One layer of a decoder."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.models.layers.attention import Attention, AttentionInputs
from fastdeploy_sd.models.layers.mlp import FeedForward
from fastdeploy_sd.models.layers.norm import RmsNorm
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache


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
