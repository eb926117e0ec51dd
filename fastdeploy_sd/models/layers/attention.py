"""Self-attention over one layer of the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paddle import Tensor

from fastdeploy_sd.models.layers.linear import Linear, LinearLayer
from fastdeploy_sd.ops.attention import cascade_append_attention, find_shared_prefixes, rope_store_kv_
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, RequestBlocks, Rotary, SharedPrefixes
from fastdeploy_sd.types import I32


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """The rows whose output is wanted, where the others only fill the KV cache: at most the last one of each request.

    `indices` i32[n], n >= 1, rise; they may be the host's. Request r owns rows [q[r], q[r+1]) of query_start_loc.
    """

    indices: Tensor | I32
    query_start_loc: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The step's maps as tensors, shared by all layers; see fastdeploy_sd/device/step_memory.py.

    Attributes:
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
    _prefixes: dict[int, SharedPrefixes[Tensor]] = field(init=False, default_factory=dict)

    @property
    def wanted_start_loc(self) -> Tensor:
        """i32[R+1], request r owns rows [q[r], q[r+1]) of those whose output is wanted."""
        return self.query_start_loc if self.outputs is None else self.outputs.query_start_loc

    def prefixes(self, block_size: int, group_size: int) -> SharedPrefixes[Tensor]:
        """What the requests share, found by the first layer that asks; see `find_shared_prefixes`."""
        if group_size not in self._prefixes:
            starts = self.wanted_start_loc
            found = find_shared_prefixes(starts, self.seq_lens, self.blocks, block_size, group_size)
            self._prefixes[group_size] = found
        return self._prefixes[group_size]


class Attention:
    """Project, rotate, store KV, attend, project back."""

    def __init__(self, qkv: Linear, output: LinearLayer, head_dim: int, qk_norm: QkNorm[Tensor] | None) -> None:
        self._qkv, self._output, self._qk_norm = qkv, output, qk_norm
        self._scale = head_dim**-0.5

    def __call__(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of the wanted rows; writes the T new tokens' KV."""
        q = self.store_kv(x, cache, inputs)
        if inputs.outputs is not None:
            q = gather_output_rows(q, inputs.outputs.indices)
        prefixes = inputs.prefixes(cache.block_size, q.shape[1] // (cache.head_dim * cache.num_kv_heads))
        starts, lengths = inputs.wanted_start_loc, inputs.seq_lens
        y = cascade_append_attention(q, cache, starts, lengths, inputs.blocks, self._scale, prefixes)
        return self._output(y)

    def store_kv(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> rotated q [T, Hq * D]; writes the T new tokens' KV."""
        qkv = self._qkv(x)
        q = rope_store_kv_(qkv, cache, inputs.positions, inputs.slot_mapping, inputs.rotary, self._qk_norm)
        if inputs.on_stored is not None:
            inputs.on_stored(cache, inputs)
        return q
