"""Self-attention over one layer of the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paddle import Tensor

from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.layers.linear import AdaptedLayer, Linear
from fastdeploy_sd.models.rope_config import RopeConfig
from fastdeploy_sd.ops.attention import cascade_append_attention, find_shared_prefixes, rope_store_kv_
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.delta_memory import DeltaStates
from fastdeploy_sd.ops.kv_cache import KvCache, QkNorm, RequestBlocks, Rotary, SharedPrefixes
from fastdeploy_sd.ops.rowwise import sigmoid_gate
from fastdeploy_sd.types import I32


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """The rows whose output is wanted, where the others only fill the KV cache: the last ones of each request, or none.

    `indices` i32[n], n >= 1, rise; they may be the host's. Request r owns rows [q[r], q[r+1]) of query_start_loc.
    """

    indices: Tensor | I32
    query_start_loc: Tensor


class GroupMaps(NamedTuple):
    """Where the layers of a KV group keep the step's tokens and those before; see StepMemory and RequestTable."""

    slot_mapping: Tensor
    blocks: RequestBlocks[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The step's maps as tensors, shared by all layers; see fastdeploy_sd/device/step_memory.py.

    Attributes:
        slot_mapping, blocks: of the first KV group. more_groups: those of the others.
        rotary: of every kind of layer.
        tree_mask: which new tokens each one sees, where they may be trees of drafts; see `cascade_append_attention`.
        states: what the step does with recurrent states; None = the model has none.
        outputs: None = every row's output is wanted.
        adapter_slots: i32[T], each row's slot of an adapter or -1; None = rows have none. Only where `outputs` is None.
        on_stored: called with a layer's cache once the step's tokens are in it, for calls that belong there; in a
            recording they stand between the layer's own.
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    blocks: RequestBlocks[Tensor]
    rotary: Mapping[RopeConfig | None, Rotary[Tensor]]
    outputs: OutputRows | None = None
    on_stored: Callable[[KvCache[Tensor], AttentionInputs], None] | None = None
    more_groups: Sequence[GroupMaps] = ()
    tree_mask: Tensor | None = None
    states: DeltaStates[Tensor] | None = None
    adapter_slots: Tensor | None = None
    _prefixes: dict[tuple[int, int], SharedPrefixes[Tensor]] = field(init=False, default_factory=dict)

    @property
    def wanted_start_loc(self) -> Tensor:
        """i32[R+1], request r owns rows [q[r], q[r+1]) of those whose output is wanted."""
        return self.query_start_loc if self.outputs is None else self.outputs.query_start_loc

    def maps_of(self, cache: KvCache[Tensor]) -> GroupMaps:
        """Return those of a layer's KV group."""
        return self.more_groups[cache.group - 1] if cache.group else GroupMaps(self.slot_mapping, self.blocks)

    def prefixes(self, cache: KvCache[Tensor], group_size: int) -> SharedPrefixes[Tensor]:
        """What the requests share, found by a KV group's first layer that asks; see `find_shared_prefixes`."""
        key = cache.group, group_size
        if key not in self._prefixes:
            starts, blocks = self.wanted_start_loc, self.maps_of(cache).blocks
            self._prefixes[key] = find_shared_prefixes(starts, self.seq_lens, blocks, cache.block_size, group_size)
        return self._prefixes[key]


class Attention:
    """Project, rotate, store KV, attend, project back."""

    def __init__(
        self,
        qkv: Linear,
        output: AdaptedLayer,
        config: AttentionConfig,
        qk_norm: QkNorm[Tensor] | None,
        sinks: Tensor | None = None,
        gate: Linear | None = None,
    ) -> None:
        self._qkv, self._output, self._rope, self._qk_norm = qkv, output, config.rope, qk_norm
        self._scale = config.head_dim**-0.5 if config.scale is None else config.scale
        self._window, self._softcap, self._sinks, self._gate = config.window, config.softcap, sinks, gate

    def __call__(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of the wanted rows; writes the T new tokens' KV."""
        q = self.store_kv(x, cache, inputs)
        if inputs.outputs is not None:
            q = gather_output_rows(q, inputs.outputs.indices)
            x = gather_output_rows(x, inputs.outputs.indices) if self._gate is not None else x
        group_size = q.shape[1] // (cache.head_dim * cache.num_kv_heads)
        y = cascade_append_attention(
            q,
            cache,
            inputs.wanted_start_loc,
            inputs.seq_lens,
            inputs.maps_of(cache).blocks,
            self._scale,
            inputs.prefixes(cache, group_size) if self._window is None else None,
            inputs.tree_mask,
            window=self._window,
            softcap=self._softcap,
            sinks=self._sinks,
        )
        gated = y if self._gate is None else sigmoid_gate(y, self._gate(x, slots=inputs.adapter_slots))
        return self._output(gated, slots=inputs.adapter_slots)

    def store_kv(self, x: Tensor, cache: KvCache[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> rotated q [T, Hq * D]; writes the T new tokens' KV."""
        qkv = self._qkv(x, slots=inputs.adapter_slots)
        slots, rotary = inputs.maps_of(cache).slot_mapping, inputs.rotary[self._rope]
        q = rope_store_kv_(qkv, cache, inputs.positions, slots, rotary, self._qk_norm)
        if inputs.on_stored is not None:
            inputs.on_stored(cache, inputs)
        return q
