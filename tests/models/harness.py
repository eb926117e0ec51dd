"""Runs a decoder on one sequence, without engine or scheduler, to look at its logits."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from paddle import Tensor

from fastdeploy_sd.config import Config, ModelConfig, QuantizationFormats, SchedulerConfig
from fastdeploy_sd.device.tensors import from_numpy
from fastdeploy_sd.models.adapters import Adapters
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.delta_memory import DeltaStates
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.types import F32, I32, offsets
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


def first_step(num_tokens: Sequence[int]) -> DeltaStates[Tensor]:
    """What a step does with states that is the first of all its requests, which have so many tokens."""
    none, rows = [0] * len(num_tokens), list(range(len(num_tokens)))
    columns = {"table_rows": rows, "source": [-1] * len(rows), "num_replayed": none, "num_certain": list(num_tokens)}
    columns |= {"cu_snapshots": [*none, 0], "snapshot_ends": [0], "snapshot_slots": [0]}
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
        group: TpGroup = ALONE,
        adapters: Adapters | None = None,
    ) -> None:
        checkpoint = Checkpoint(golden.ROOT / model)
        self.config = read_decoder_config(checkpoint.config)
        self.dtype = dtype
        self.num_packed_bytes = 0

        def count(_: int, num_bytes: int) -> None:
            self.num_packed_bytes += num_bytes

        packer = WeightPacker(checkpoint, on_packed=count, keeps_integers=keeps_integers)
        scheme, self._shard = QuantScheme.create(dtype, quantization), group.shard  # type: ignore[arg-type]
        self.decoder = Decoder(checkpoint, self.config, scheme, packer, group, adapters=adapters)

    def logits(self, token_ids: I32) -> F32:
        """Return f32[T, V], the logits after every token of the sequence, computed in one call."""
        return self.batch_logits([token_ids])

    def batch_logits(self, sequences: Sequence[I32], slots: Sequence[int] | None = None) -> F32:
        """Return those of several sequences, each with the adapter in its slot, one after another."""
        counts, c = np.array([len(sequence) for sequence in sequences]), self.config
        token_ids = np.concatenate(sequences)
        max_blocks = -(-int(counts.max()) // BLOCK_SIZE)
        tables = np.arange(len(sequences) * max_blocks, dtype=np.int32).reshape(len(sequences), max_blocks)
        positions = np.concatenate([np.arange(count) for count in counts])
        rows = np.repeat(np.arange(len(sequences)), counts)
        layers = kv_sizing.LayerKv.of_decoder(c, self._shard)
        caches = kv_memory.allocate(layers, tables.size, kv_sizing.KvCacheFormat(BLOCK_SIZE, self.dtype))
        inputs = AttentionInputs(
            positions=from_numpy(positions.astype(np.int32)),
            slot_mapping=from_numpy(rows * max_blocks * BLOCK_SIZE + positions),
            query_start_loc=from_numpy(offsets(counts)),
            seq_lens=from_numpy(counts.astype(np.int32)),
            blocks=RequestBlocks(from_numpy(np.arange(len(sequences), dtype=np.int32)), from_numpy(tables)),
            rotary=make_rotary(c, int(counts.max()), c.max_position),
            states=first_step(counts.tolist()) if c.delta_nets else None,
            adapter_slots=None if slots is None else from_numpy(np.array(slots, np.int32)[rows]),
        )
        states = allocate_states(c, self.dtype, len(sequences), self._shard)
        memories = caches if states is None else layer_memories(c, caches, states.nets)
        hidden = self.decoder.forward(np.ascontiguousarray(token_ids, np.int32), memories, inputs)
        return np.asarray(self.decoder.logits(hidden).numpy())
