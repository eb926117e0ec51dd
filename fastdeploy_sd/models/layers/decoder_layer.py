"""One layer of a decoder, and its norms."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.layers.attention import Attention, AttentionInputs
from fastdeploy_sd.models.layers.mlp import FeedForward
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.rowwise import concat_rms_norm, rms_norm


class RmsNorm:
    """h = x (+ residual); returns (h normalised and scaled, in x's dtype; h as float32)."""

    def __init__(self, weight: Weights, eps: float) -> None:
        self._weight, self._eps = constant(weight), eps

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self._weight, self._eps, residual)


class ConcatRmsNorm:
    """Two matrices [T, H], each normalised and scaled with weights of its own, side by side: [T, 2 * H]."""

    def __init__(self, first_weight: Weights, second_weight: Weights, eps: float) -> None:
        self._first, self._second = constant(first_weight), constant(second_weight)
        self._eps = eps

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        return concat_rms_norm(first, second, self._first, self._second, self._eps)


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
