"""A decoder-only transformer over packed weights: every served architecture is this class with another config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.adapters import Adapters
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.decoder_layer import LayerMemory, OnStream, RmsNorm, run_before_last
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.float16_range import verify_float16
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.bf16 import narrow, storage, widen
from fastdeploy_sd.ops.linear import gather_weight_rows
from fastdeploy_sd.ops.rowwise import softcap
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix, WeightPart
from fastdeploy_sd.types import I32


class Embedding:
    """Token ids to rows of a table [V, H], in the model's dtype; raises CheckpointError where float16 is too narrow.

    Integers stay integers where the packer keeps them: a tied head has the same.
    """

    def __init__(self, part: WeightPart, scheme: QuantScheme, packer: WeightPacker) -> None:
        dtype, self._dtype = storage(scheme.dtype), scheme.dtype
        self._packed = packer.integers(WeightMatrix((part,)))
        if self._packed is not None:
            return
        if isinstance(part, FloatPart) and part.data.dtype == dtype:
            # On a CPU it stays in the mapped file: a step touches a few rows of it.
            self._table = device().wrap(part.data)
            return

        def convert(rows: slice, out: Weights) -> None:
            numbers = part.rows(rows.start, rows.stop).numbers()
            if dtype == np.float16:
                verify_float16(numbers)
            out[...] = narrow(widen(numbers.data), dtype)

        self._table = device().filled(part.shape, dtype, convert)

    def __call__(self, input_ids: Tensor | I32) -> Tensor:
        """i32[T] -> [T, H]."""
        if self._packed is not None:
            return gather_weight_rows(self._packed, input_ids, self._dtype)
        return gather_output_rows(self._table, input_ids)


class Decoder:
    """Token ids to hidden rows, hidden rows to logits: whole ones on every rank.

    Attributes:
        config: the architecture, whatever this rank has of it.
        dtype: of the activations.
        embed, final_norm: draft layers may share them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (it is one model)
        self,
        source: WeightSource,
        config: DecoderConfig,
        scheme: QuantScheme,
        packer: WeightPacker | None = None,
        group: TpGroup = ALONE,
        weights: DecoderWeights | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Load this rank's part.

        Args:
            packer: the source's, None = one that packs everything.
            weights: of the source; None = as it has them. Another head has logits for other tokens.
            adapters: get the layers that they can change.

        Raises CheckpointError: a tensor is missing, has another shape, would not be used, or is not for float16.
        """
        self.config, self.dtype = config, scheme.dtype
        weights = DecoderWeights(source, config) if weights is None else weights
        weights.verify()
        packer = WeightPacker(source) if packer is None else packer
        builder = LayerBuilder(config, scheme, packer, group, adapters)
        self.embed = Embedding(weights.embedding(), scheme, packer)
        scales = (config.embedding_scale, *[config.residual_scale] * config.num_layers)
        self._layers = [builder.layer(weights, i, scales[i]) for i in range(config.num_layers)]
        # Logits are linear in what this norm returns.
        final_weight = np.multiply(weights.final_norm(), config.logits_scale, dtype=np.float32)
        self.final_norm = RmsNorm(final_weight, config.norm_eps, scales[-1])
        self.lm_head_format = scheme.lm_head
        head = weights.lm_head()
        if head.shape[0] != config.vocab_size:
            builder = LayerBuilder(replace(config, vocab_size=head.shape[0]), scheme, packer, group)
        self._lm_head = builder.head(head, scheme.lm_head)

    def forward(
        self,
        input_ids: Tensor | I32,
        caches: Sequence[LayerMemory],
        inputs: AttentionInputs,
        on_stream: OnStream | None = None,
    ) -> Tensor:
        """Run the step's tokens i32[T], store their KV, and return the hidden rows after the final norm [T, H].

        Where `inputs.outputs` names the wanted rows, the result has only those.
        """
        last = self._layers[-1]
        x, residual = run_before_last(self._layers, self.embed(input_ids), None, caches, inputs, on_stream)
        normed, stream = last.input_norm(x, residual)
        hidden, end = self.final_norm(*last.run(normed, stream, caches[-1], inputs))
        if on_stream is not None:
            on_stream(len(self._layers) - 1, stream)
            on_stream(len(self._layers), end)
        return hidden

    def store_kv(self, input_ids: Tensor | I32, caches: Sequence[LayerMemory], inputs: AttentionInputs) -> None:
        """Only store the KV of the step's tokens i32[T]."""
        before = run_before_last(self._layers, self.embed(input_ids), None, caches, inputs)
        self._layers[-1].store_kv(*before, caches[-1], inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, H] -> f32[L, V]."""
        logits, cap = self._lm_head(hidden, paddle.float32), self.config.logits_cap
        return logits if cap is None else softcap(logits, cap)
