"""The memory of recurrent states on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from paddle import Tensor

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.attention_config import GatedDeltaConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.layers.decoder_layer import LayerMemory
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.delta_memory import DeltaMemory
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.kv.kv_memory import Zeros, asking_for_memory
from fastdeploy_sd.worker.kv.state_sizing import NetShape, StateSize


@dataclass(frozen=True, slots=True, eq=False)
class StateMemory:
    """Those of all layers that have one, in their order.

    Attributes:
        shapes: of the nets.
    """

    size: StateSize
    nets: Sequence[DeltaMemory[Tensor]]
    shapes: Sequence[NetShape]

    @classmethod
    def allocate(
        cls, config: Config, decoder: DecoderConfig, size: StateSize, shard: Shard, zeros: Zeros | None = None
    ) -> StateMemory:
        """Allocate a rank's part, of which the system provides what is used; raises ConfigError: it has too little.

        `zeros`: allocates it; None = the device.
        """
        dtype = storage(config.model.dtype)
        num_slots = size.num_rows + size.num_snapshots

        make = zeros or device().zeros

        def memory(own: NetShape) -> DeltaMemory[Tensor]:
            return DeltaMemory(
                state=make((num_slots, own.num_heads, own.key_dim, own.value_dim), np.float32),
                conv=make((num_slots, own.conv_width - 1, own.num_channels), dtype),
                drafts=make((size.num_rows, size.num_drafts, own.row_size), dtype),
            )

        shapes = [NetShape.of_rank(decoder, net, shard) for net in decoder.delta_nets]
        with asking_for_memory("num_state_snapshots, max_num_seqs"):
            return cls(size, [memory(shape) for shape in shapes], shapes)


def pieces_of_states(ranks: Sequence[StateMemory]) -> list[list[tuple[Bytes, ...]]]:
    """Return the parts of every net's snapshots, u8[num_snapshots, n] each, of every rank that has the same.

    All heads of the state, then for each row of the convolution its columns of q, k and v. So together they are the
    same for any number of ranks.
    """
    nets = [zip(rank.shapes, rank.nets, strict=True) for rank in ranks]
    return [_pieces(ranks[0].size.num_rows, net) for net in zip(*nets, strict=True)]


def _pieces(begin: int, net: Iterable[tuple[NetShape, DeltaMemory[Tensor]]]) -> list[tuple[Bytes, ...]]:
    """Return the parts of a net from slot `begin` on, in their order, from all ranks with their shapes."""
    copies: dict[tuple[int, int, int], list[Bytes]] = {}  # (row or -1, part of the row, its first column) -> by rank
    for shape, memory in net:
        state, conv = device().read(memory.state)[begin:], device().read(memory.conv)[begin:]
        copies.setdefault((-1, 0, shape.heads.start), []).append(state.reshape(len(state), -1).view(np.uint8))
        parts = np.split(conv, np.cumsum([len(columns) for columns in shape.columns[:-1]]), axis=2)
        for row in range(conv.shape[1]):
            for i, (columns, part) in enumerate(zip(shape.columns, parts, strict=True)):
                copies.setdefault((row, i, columns.start), []).append(part[:, row].view(np.uint8))
    return [tuple(piece) for _, piece in sorted(copies.items())]


def layer_memories(
    decoder: DecoderConfig, caches: Sequence[KvCache[Tensor]], nets: Sequence[DeltaMemory[Tensor]]
) -> list[LayerMemory]:
    """Return what each layer of a decoder knows of the tokens before a step's."""
    left, states = iter(caches), iter(nets)
    return [next(states) if isinstance(layer.attention, GatedDeltaConfig) else next(left) for layer in decoder.layers]
