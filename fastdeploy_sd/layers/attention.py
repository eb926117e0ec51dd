"""Self-attention over one layer of the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paddle import Tensor

from fastdeploy_sd.layers.linear import Linear, LinearLayer
from fastdeploy_sd.ops.attention import cascade_append_attention, rope_store_kv_
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, RequestBlocks, Rotary
from fastdeploy_sd.types import I32


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """The rows whose output is wanted, where the others only fill the KV cache: at most the last one of each request.

    Attributes:
        indices: i32[n], n >= 1, rising, among the step's T rows; on the host or a tensor.
        query_start_loc: i32[R+1], request r owns wanted rows [q[r], q[r+1]).
    """

    indices: Tensor | I32
    query_start_loc: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The step's maps as tensors, shared by all layers; see fastdeploy_sd/step_memory.py.

    Attributes:
        positions: i32[T]; slot_mapping: i64[T]; query_start_loc: i32[R+1]; seq_lens: i32[R];
        blocks: of the requests.
        rotary: its table has max_model_len rows.
        outputs: None = every row's output is wanted.
        on_stored: called with a layer's cache once the step's tokens are in it, for calls that belong there; in a
            recording they stand between the layer's own.
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    blocks: RequestBlocks[Tensor]
    rotary: Rotary[Tensor]
    outputs: OutputRows | None = None
    on_stored: Callable[[KvCache[Tensor], AttentionInputs], None] | None = None


class Attention:
    """Project, rotate, store KV, attend, project back."""

    def __init__(self, qkv: Linear, output: LinearLayer, head_dim: int, qk_norm: QkNorm[Tensor] | None) -> None:
        self._qkv, self._output, self._qk_norm = qkv, output, qk_norm
        self._scale = head_dim**-0.5

    def __call__(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of the wanted rows; writes the T new tokens' KV."""
        q, starts = self.store_kv(x, cache, inputs), inputs.query_start_loc
        if inputs.outputs is not None:
            q, starts = gather_output_rows(q, inputs.outputs.indices), inputs.outputs.query_start_loc
        y = cascade_append_attention(q, cache, starts, inputs.seq_lens, inputs.blocks, self._scale)
        return self._output(y)

    def store_kv(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> rotated q [T, Hq * D]; writes the T new tokens' KV."""
        qkv = self._qkv(x)
        q = rope_store_kv_(qkv, cache, inputs.positions, inputs.slot_mapping, inputs.rotary, self._qk_norm)
        if inputs.on_stored is not None:
            inputs.on_stored(cache, inputs)
        return q
