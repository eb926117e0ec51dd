"""Self-attention over one layer of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import paddle
from paddle import Tensor

from fastdeploy_sd.layers.linear import Linear
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.ops.attention import cascade_append_attention, rope_store_kv_


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The step's maps as tensors, shared by all layers; see Batch in fastdeploy_sd/types.py.

    Attributes:
        positions: i32[T]; slot_mapping: i64[T]; query_start_loc: i32[R+1]; seq_lens: i32[R];
        block_tables: i32[R, max_blocks].
        rope: f32[max_model_len, rotary_dim], cosines then sines.
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    rope: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerKvCache:
    """One layer's keys and values; layout in custom_ops/include/fdsd/kv_cache.h."""

    k: Tensor
    v: Tensor


class Attention:
    """Project, rotate, store KV, attend, project back."""

    def __init__(
        self, config: DecoderConfig, qkv: Linear, output: Linear, qk_norms: tuple[Weights, Weights] | None
    ) -> None:
        self._config, self._qkv, self._output = config, qkv, output
        norms = (None, None) if qk_norms is None else tuple(paddle.to_tensor(w) for w in qk_norms)
        self._q_norm, self._k_norm = norms
        self._scale = config.head_dim**-0.5

    def __call__(self, x: Tensor, cache: LayerKvCache, inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H]; writes the T new tokens' KV."""
        q = rope_store_kv_(
            self._qkv(x), cache.k, cache.v, inputs.positions, inputs.slot_mapping, inputs.rope,
            num_heads=self._config.num_heads, interleaved=self._config.rope_interleaved,
            q_norm=self._q_norm, k_norm=self._k_norm, norm_eps=self._config.norm_eps,
        )  # fmt: skip
        y = cascade_append_attention(
            q, cache.k, cache.v, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, self._scale
        )
        return self._output(y)
