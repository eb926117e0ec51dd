"""A golden model and steps of several requests, to be run in every way: eager or recorded, alone or as a rank."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.device.program import paddle_ops
from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.layers.linear import ALONE, TpGroup
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.ops.operators import declared_ops
from fastdeploy_sd.worker.kv import kv_memory, kv_sizing
from fastdeploy_sd.worker.kv.state_memory import layer_memories
from fastdeploy_sd.worker.loading.rotary import make_rotary
from fastdeploy_sd.worker.step.forward import EagerForward, Forward, ForwardPass, RecordedForward
from tests.models import golden
from tests.models.harness import allocate_states

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 96, 256
# Tokens that each request runs in a step, and whether all of their logits are wanted, else the last one's.
STEPS: list[tuple[list[int], bool]] = [
    ([3], False),
    ([1, 1, 1], False),
    ([5], True),
    ([70, 2, 1, 9], False),
    ([1], False),
    ([4, 4, 4, 4, 4, 4], True),
    ([130], True),
    ([1, 1], True),
]


class Model:
    """A golden model (its name, or a directory) with two KV caches of its own, one for each way to run it."""

    def __init__(
        self,
        name: str | pathlib.Path,
        dtype: str,
        quantization: str | None = None,
        *,
        is_int8_kv: bool = False,
        group: TpGroup = ALONE,
    ) -> None:
        paddle_ops.load(declared_ops())
        checkpoint = Checkpoint(golden.ROOT / name)
        config = read_decoder_config(checkpoint.config)
        scheme = QuantScheme.create(dtype, quantization)  # type: ignore[arg-type]
        self.decoder = Decoder(checkpoint, config, scheme, group=group)
        kv_format = kv_sizing.KvCacheFormat(BLOCK_SIZE, dtype, "int8" if is_int8_kv else "auto")
        layers = kv_sizing.LayerKv.of_decoder(config, group.shard)
        self.eager_caches, self.caches = (kv_memory.allocate(layers, NUM_BLOCKS, kv_format) for _ in range(2))
        rotary = make_rotary(config, MAX_LEN, MAX_LEN)
        self.memory = StepMemory(StepLimits(8, 256, 255), config.vocab_size, 0 if config.delta_nets else None)
        states = [allocate_states(config, dtype, 8, group.shard) for _ in range(2)]
        eager_memories, memories = (
            () if own is None else layer_memories(config, caches, own.nets)
            for own, caches in zip(states, (self.eager_caches, self.caches), strict=True)
        )
        self.memory.tree_mask[:] = -1  # chains
        self.tables = np.full((8, NUM_BLOCKS), -1, np.int32)
        over = self.memory, [self.tables]
        self.eager = EagerForward(ForwardPass(self.decoder, self.eager_caches, rotary, memories=eager_memories), *over)
        self.recorded = RecordedForward(ForwardPass(self.decoder, self.caches, rotary, memories=memories), *over)

    def load(self, step: Step) -> None:
        """Make it the step that the memory holds; request r is in table row 7 - r."""
        m = self.memory
        m.num_requests, m.num_tokens, m.num_logits = map(len, (step.seq_lens, step.positions, step.logits_indices))
        m.table_rows[: m.num_requests] = 7 - np.arange(m.num_requests)
        self.tables[m.table_rows[: m.num_requests], : step.blocks.shape[1]] = step.blocks
        for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices"):
            column = getattr(step, name)
            getattr(m, name)[: len(column)] = column
        if m.has_states:
            n, num_new = m.num_requests, np.diff(step.query_start_loc)
            m.state_source[:n] = np.where(step.seq_lens > num_new, m.table_rows[:n], -1)
            m.num_replayed[:n], m.num_certain[:n], m.cu_snapshots[: n + 1] = 0, num_new, 0

    def bits(self, forward: Forward) -> list[np.ndarray]:
        """Run the step; its hidden rows and logits."""
        forward()
        hidden = np.asarray(forward.hidden[: self.memory.num_tokens].numpy())
        return [hidden.copy(), forward.logits[: self.memory.num_logits].copy()]


class Step(NamedTuple):
    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    blocks: Any
    logits_indices: Any


def batches(steps: Sequence[tuple[list[int], bool]]) -> list[Step]:
    """Steps of requests that go on from step to step; request r has the blocks r, r + R, r + 2 R and so on."""
    rng = np.random.default_rng(0)
    num_requests = max(len(counts) for counts, _ in steps)
    max_blocks = NUM_BLOCKS // num_requests
    tables = (np.arange(num_requests)[:, None] + num_requests * np.arange(max_blocks)).astype(np.int32)
    lengths = np.zeros(num_requests, np.int32)
    return [_batch(rng, lengths, tables, *step) for step in steps]


def _batch(rng: np.random.Generator, lengths: Any, tables: Any, counts: list[int], wants_all: bool) -> Step:
    n = np.array(counts, np.int32)
    starts = np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
    rows = np.repeat(np.arange(len(n)), n)
    positions = (lengths[rows] + np.arange(starts[-1]) - starts[rows]).astype(np.int32)
    blocks = tables[rows, positions // BLOCK_SIZE].astype(np.int64)
    lengths[: len(n)] += n
    seq_lens = lengths[: len(n)].copy()
    num_columns = -(-int(seq_lens.max()) // BLOCK_SIZE)
    return Step(
        input_ids=rng.integers(4, 4000, starts[-1]).astype(np.int32),
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start_loc=starts,
        seq_lens=seq_lens,
        blocks=tables[: len(n), :num_columns],
        logits_indices=np.arange(starts[-1], dtype=np.int32) if wants_all else starts[1:] - 1,
    )


def cache_bits(caches: Sequence[KvCache[Any]]) -> list[np.ndarray]:
    parts = [part for cache in caches for part in (cache.k, cache.v, cache.k_scale, cache.v_scale) if part is not None]
    return [np.asarray(part.numpy()) for part in parts]
