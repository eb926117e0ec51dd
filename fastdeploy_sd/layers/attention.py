"""Self-attention over one layer of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from paddle import Tensor

from fastdeploy_sd.layers.linear import Linear
from fastdeploy_sd.ops.attention import cascade_append_attention, rope_store_kv_
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, Rotary


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The step's maps as tensors, shared by all layers; see Batch in fastdeploy_sd/types.py.

    Attributes:
        positions: i32[T]; slot_mapping: i64[T]; query_start_loc: i32[R+1]; seq_lens: i32[R];
        block_tables: i32[R, max_blocks].
        rotary: its table has max_model_len rows.
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    rotary: Rotary[Tensor]


class Attention:
    """Project, rotate, store KV, attend, project back."""

    def __init__(self, qkv: Linear, output: Linear, head_dim: int, qk_norm: QkNorm[Tensor] | None) -> None:
        self._qkv, self._output, self._qk_norm = qkv, output, qk_norm
        self._scale = head_dim**-0.5

    def __call__(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H]; writes the T new tokens' KV."""
        qkv = self._qkv(x)
        q = rope_store_kv_(qkv, cache, inputs.positions, inputs.slot_mapping, inputs.rotary, self._qk_norm)
        y = cascade_append_attention(
            q, cache, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, self._scale
        )
        return self._output(y)
