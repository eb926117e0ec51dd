"""Runs a decoder on one sequence, without engine or scheduler, to look at its logits."""

from __future__ import annotations

import pathlib

import numpy as np
from paddle import Tensor

from fastdeploy_sd.config import Config, ModelConfig, QuantizationFormats, SchedulerConfig
from fastdeploy_sd.device.tensors import from_numpy
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.delta_memory import DeltaStates
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.types import F32, I32
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard
from fastdeploy_sd.worker.kv import kv_memory, kv_sizing
from fastdeploy_sd.worker.kv.state_memory import StateMemory, layer_memories
from fastdeploy_sd.worker.kv.state_sizing import state_size
from fastdeploy_sd.worker.loading.rotary import make_rotary
from tests.models import golden

BLOCK_SIZE = 64


def allocate_states(config: DecoderConfig, dtype: str, num_rows: int, shard: Shard = WHOLE_MODEL) -> StateMemory | None:
    """Recurrent states of so many requests, without snapshots; None = the model has none."""
    scheduler = SchedulerConfig(max_num_seqs=num_rows)
    options = Config(ModelConfig("unused", dtype=dtype), scheduler=scheduler)  # type: ignore[arg-type]
    size = state_size(options, config, lambda: 0)
    return None if size is None else StateMemory.allocate(options, config, size, shard)


def first_step(num_tokens: int) -> DeltaStates[Tensor]:
    """What a step does with states that is the first of its only request."""
    columns = {"table_rows": [0], "source": [-1], "num_replayed": [0], "num_certain": [num_tokens]}
    columns |= {"cu_snapshots": [0, 0], "snapshot_ends": [0], "snapshot_slots": [0]}
    return DeltaStates(**{name: from_numpy(np.array(values, np.int32)) for name, values in columns.items()})


class SingleSequence:
    """One model (a golden one's name, or a directory) and the logits of one sequence at a time."""

    def __init__(
        self,
        model: str | pathlib.Path,
        dtype: str,
        quantization: str | QuantizationFormats | None = None,
        *,
        keeps_integers: bool = False,
    ) -> None:
        checkpoint = Checkpoint(golden.ROOT / model)
        self.config = read_decoder_config(checkpoint.config)
        self.dtype = dtype
        self.num_packed_bytes = 0

        def count(_: int, num_bytes: int) -> None:
            self.num_packed_bytes += num_bytes

        packer = WeightPacker(checkpoint, on_packed=count, keeps_integers=keeps_integers)
        self.decoder = Decoder(checkpoint, self.config, QuantScheme.create(dtype, quantization), packer)  # type: ignore[arg-type]

    def logits(self, token_ids: I32) -> F32:
        """Return f32[T, V], the logits after every token of the sequence, computed in one call."""
        n, c = len(token_ids), self.config
        blocks = -(-n // BLOCK_SIZE)
        layers, kv_format = kv_sizing.LayerKv.of_decoder(c), kv_sizing.KvCacheFormat(BLOCK_SIZE, self.dtype)
        caches = kv_memory.allocate(layers, blocks, kv_format)
        inputs = AttentionInputs(
            positions=from_numpy(np.arange(n, dtype=np.int32)),
            slot_mapping=from_numpy(np.arange(n, dtype=np.int64)),
            query_start_loc=from_numpy(np.array([0, n], np.int32)),
            seq_lens=from_numpy(np.array([n], np.int32)),
            blocks=RequestBlocks(
                from_numpy(np.zeros(1, np.int32)), from_numpy(np.arange(blocks, dtype=np.int32)[None].copy())
            ),
            rotary=make_rotary(c, n, c.max_position),
            states=first_step(n) if c.delta_nets else None,
        )
        states = allocate_states(c, self.dtype, 1)
        memories = caches if states is None else layer_memories(c, caches, states.nets)
        hidden = self.decoder.forward(np.ascontiguousarray(token_ids, np.int32), memories, inputs)
        return np.asarray(self.decoder.logits(hidden).numpy())
