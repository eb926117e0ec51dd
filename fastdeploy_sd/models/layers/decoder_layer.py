"""One layer of a decoder, and its norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.mlp import FeedForward
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.delta_memory import DeltaMemory
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.rowwise import concat_rms_norm, rms_norm


class RmsNorm:
    """h = x * x_scale (+ residual); returns (h normalised and weighted, in x's dtype; h as float32)."""

    def __init__(self, weight: Weights, eps: float, x_scale: float = 1.0) -> None:
        self._weight, self._eps, self._x_scale = constant(weight), eps, x_scale

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self._weight, self._eps, residual, self._x_scale)


class InputNorm(Protocol):
    """What a layer does to its input: the rows that attention reads, and the residual stream f32[T, H]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]: ...


class ConcatRmsNorm:
    """Two matrices [T, H], each normalised and scaled with weights of its own, side by side: [T, 2 * H]."""

    def __init__(self, first_weight: Weights, second_weight: Weights, eps: float) -> None:
        self._first, self._second = constant(first_weight), constant(second_weight)
        self._eps = eps

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        return concat_rms_norm(first, second, self._first, self._second, self._eps)


# What a layer knows of the tokens before a step's.
LayerMemory = KvCache[Tensor] | DeltaMemory[Tensor]


class TokenMixer(Protocol):
    """Attention, or what is in its place: reads the tokens before, by a memory of its kind."""

    def __call__(self, x: Tensor, memory: Any, inputs: AttentionInputs, /) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of the wanted rows; writes the T new tokens to the memory."""
        ...

    def store_kv(self, x: Tensor, memory: Any, inputs: AttentionInputs, /) -> object:
        """Only write the T new tokens to the memory."""
        ...


class DecoderLayer:
    """h += attention(norm(h)); h += feed_forward(norm(h)); the additions happen inside the norms.

    Where there are `output_norms`, what attention and feed-forward network return is normalised before it is added.
    """

    def __init__(
        self,
        input_norm: InputNorm,
        attention: TokenMixer,
        feed_forward_norm: RmsNorm,
        feed_forward: FeedForward,
        output_norms: tuple[RmsNorm, RmsNorm] | None,
    ) -> None:
        self.input_norm, self._attention = input_norm, attention
        self._feed_forward_norm, self._feed_forward = feed_forward_norm, feed_forward
        self._output_norms = output_norms

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: LayerMemory, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] still to be added to residual f32[T, H] (None: x is the embedding) -> the same pair.

        Where `inputs.outputs` names the wanted rows, the result has only those.
        """
        return self.run(*self.input_norm(x, residual), cache, inputs)

    def run(
        self, normed: Tensor, residual: Tensor, cache: LayerMemory, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Run what follows after the input norm, which returned normed and residual; else as a call."""
        x = self._attention(normed, cache, inputs)
        if inputs.outputs is not None:
            residual = gather_output_rows(residual, inputs.outputs.indices)
        if self._output_norms is not None:
            x, _ = self._output_norms[0](x)
        x, residual = self._feed_forward_norm(x, residual)
        x = self._feed_forward(x, inputs.adapter_slots)
        if self._output_norms is not None:
            x, _ = self._output_norms[1](x)
        return x, residual

    def store_kv(self, x: Tensor, residual: Tensor | None, cache: LayerMemory, inputs: AttentionInputs) -> None:
        """Only write the KV of x and residual as in a call."""
        normed, _ = self.input_norm(x, residual)
        self.store_kv_of(normed, cache, inputs)

    def store_kv_of(self, normed: Tensor, cache: LayerMemory, inputs: AttentionInputs) -> None:
        """Only write the KV of what the input norm returned."""
        self._attention.store_kv(normed, cache, inputs)


# Called with a layer's number and the residual stream f32[T, H] that enters it; after the last layer with their number.
OnStream = Callable[[int, Tensor], None]


def run_before_last(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    residual: Tensor | None,
    caches: Sequence[LayerMemory],
    inputs: AttentionInputs,
    on_stream: OnStream | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run all layers but the last, over all rows, and return its input."""
    if inputs.outputs is not None:
        inputs = replace(inputs, outputs=None)
    for i, layer in enumerate(layers[:-1]):
        normed, residual = layer.input_norm(x, residual)
        if on_stream is not None:
            on_stream(i, residual)
        x, residual = layer.run(normed, residual, caches[i], inputs)
    return x, residual
