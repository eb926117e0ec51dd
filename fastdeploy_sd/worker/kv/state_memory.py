"""The memory of recurrent states on a rank."""

from __future__ import annotations

from collections.abc import Sequence
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
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.kv.kv_memory import asking_for_memory
from fastdeploy_sd.worker.kv.state_sizing import NetShape, StateSize


@dataclass(frozen=True, slots=True, eq=False)
class StateMemory:
    """Those of all layers that have one, in their order."""

    size: StateSize
    nets: Sequence[DeltaMemory[Tensor]]

    @classmethod
    def allocate(cls, config: Config, decoder: DecoderConfig, size: StateSize, shard: Shard) -> StateMemory:
        """Allocate a rank's part, of which the system provides what is used; raises ConfigError: it has too little."""
        dtype = storage(config.model.dtype)
        num_slots = size.num_rows + size.num_snapshots

        def memory(net: GatedDeltaConfig) -> DeltaMemory[Tensor]:
            own, zeros = NetShape.of_rank(decoder, net, shard), device().zeros
            return DeltaMemory(
                state=zeros((num_slots, own.num_heads, own.key_dim, own.value_dim), np.float32),
                conv=zeros((num_slots, own.conv_width - 1, own.num_channels), dtype),
                drafts=zeros((size.num_rows, size.num_drafts, own.row_size), dtype),
            )

        with asking_for_memory("num_state_snapshots, max_num_seqs"):
            return cls(size, [memory(net) for net in decoder.delta_nets])


def layer_memories(
    decoder: DecoderConfig, caches: Sequence[KvCache[Tensor]], nets: Sequence[DeltaMemory[Tensor]]
) -> list[LayerMemory]:
    """Return what each layer of a decoder knows of the tokens before a step's."""
    left, states = iter(caches), iter(nets)
    return [next(states) if isinstance(layer.attention, GatedDeltaConfig) else next(left) for layer in decoder.layers]
