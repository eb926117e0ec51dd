"""Texts that go through a gated delta net: each at once, and cut into steps with drafts, of which some are rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_sd.ops.bf16 import narrow
from fastdeploy_sd.ops.delta_memory import DeltaMemory, DeltaStates, DeltaWeights
from fastdeploy_sd.ops.gated_delta import gated_delta_net_
from fastdeploy_sd.types import offsets
from tests.ops.cases.gated_delta import DeltaShape, memory_of, weights_of

I32 = np.int32


@dataclass(frozen=True)
class DeltaText:
    """The rows of a text, and what one long step makes of them.

    Attributes:
        y: [N, Hv * dv].
        states, convs: [N + 1, ...], after so many rows.
    """

    qkvz: np.ndarray
    ba: np.ndarray
    y: np.ndarray
    states: np.ndarray
    convs: np.ndarray


@dataclass
class Progress:
    """A request: its row of the table, rows in its live state, rows known to be right, and its snapshots by end."""

    row: int
    live: int = 0
    computed: int = 0
    source: int | None = None


class DeltaServer:
    """Runs texts as requests, each in a row of the table of its own."""

    def __init__(self, seed: int, shape: DeltaShape, dtype: str, *, max_drafts: int, num_rows: int) -> None:
        self.rng, self.shape, self.dtype = np.random.default_rng(seed), shape, dtype
        self.max_drafts, self.num_rows = max_drafts, num_rows
        self.weights: DeltaWeights[Any] = weights_of(self.rng, shape)

    def memory(self, num_snapshots: int) -> DeltaMemory[Any]:
        """Memory that is full of numbers of others."""
        return memory_of(self.rng, self.shape, self.dtype, self.num_rows, num_snapshots, self.max_drafts)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Any rows of qkvz and ba."""
        values = self.shape.value_heads * self.shape.value_dim
        qkvz = self.rng.standard_normal((count, self.shape.qkv + values), np.float32) * 2
        ba = self.rng.standard_normal((count, 2 * self.shape.value_heads), np.float32)
        return narrow(qkvz, self.dtype), narrow(ba, self.dtype)

    def text(self, count: int) -> DeltaText:
        """A text and what one step with a snapshot after each row makes of it."""
        qkvz, ba = self.rows(count)
        memory = self.memory(count)
        slots = np.arange(self.num_rows, self.num_rows + count, dtype=I32)
        row, source, replayed, certain = np.array([[1], [-1], [0], [count]], I32)
        ends = slots - slots[0] + 1
        states = DeltaStates(row, source, replayed, certain, offsets([count]), ends, slots)
        y = gated_delta_net_(qkvz, ba, self.weights, memory, states, offsets([count]))
        after = [np.concatenate([np.zeros_like(part[:1]), part[slots]]) for part in (memory.state, memory.conv)]
        np.testing.assert_array_equal(memory.state[1], memory.state[slots[-1]])
        return DeltaText(qkvz, ba, y, *after)

    def serve(self, texts: list[DeltaText]) -> None:
        """Run the texts to their ends in steps of any cut; every row, state and snapshot must have the texts' bits."""
        memory = self.memory(2 * len(texts))
        served = [Progress(row) for row in self.rng.permutation(self.num_rows)[: len(texts)].tolist()]
        while any(request.computed < len(text.y) for request, text in zip(served, texts, strict=True)):
            self._step(
                memory, [pair for pair in zip(range(len(texts)), served, texts, strict=True) if self._runs(pair)]
            )

    def _runs(self, pair: tuple[int, Progress, DeltaText]) -> bool:
        return pair[1].computed < len(pair[2].y) and self.rng.random() < 0.8

    def _step(self, memory: DeltaMemory[Any], requests: list[tuple[int, Progress, DeltaText]]) -> None:
        rng, plans, rows = self.rng, [], []
        for place, request, text in requests:
            left = len(text.y) - request.computed
            num_certain = int(rng.integers(1, min(left, rng.choice([1, 9, 70])) + 1))
            num_drafts = int(rng.integers(0, self.max_drafts + 1))
            num_right = int(rng.integers(0, min(num_drafts, left - num_certain) + 1))
            wrong = self.rows(num_drafts - num_right)
            mine = slice(request.computed, request.computed + num_certain + num_right)
            rows.append([np.concatenate(parts) for parts in zip((text.qkvz[mine], text.ba[mine]), wrong, strict=True)])
            replayed = request.computed - request.live
            ends = rng.permutation(np.arange(1, replayed + num_certain + num_drafts + 1))[: rng.integers(0, 2)]
            slot = self.num_rows + 2 * place
            slot += request.source == slot
            plans.append((request, text, replayed, num_certain, num_right, num_drafts, ends.tolist(), slot))
        if not plans:
            return
        counts = [certain + drafts for _, _, _, certain, _, drafts, _, _ in plans]
        states = DeltaStates(
            table_rows=np.array([request.row for request, *_ in plans], I32),
            source=np.array([self._source(request) for request, *_ in plans], I32),
            num_replayed=np.array([plan[2] for plan in plans], I32),
            num_certain=np.array([plan[3] for plan in plans], I32),
            cu_snapshots=offsets([len(plan[6]) for plan in plans]),
            snapshot_ends=np.array([end for plan in plans for end in plan[6]], I32),
            snapshot_slots=np.array([plan[7] for plan in plans for _ in plan[6]], I32),
        )
        qkvz, ba = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        starts = offsets(counts)
        y = gated_delta_net_(qkvz, ba, self.weights, memory, states, starts)
        for start, (request, text, replayed, num_certain, num_right, _, ends, slot) in zip(starts, plans, strict=False):
            before, right = request.computed, num_certain + num_right
            np.testing.assert_array_equal(y[start : start + right], text.y[before : before + right])
            base = before - replayed
            request.source, request.live, request.computed = None, before + num_certain, before + right
            self._assert_state(memory, request.row, text, request.live)
            for end in ends:
                if base + end <= request.computed:
                    self._assert_state(memory, slot, text, base + end)
                    if rng.random() < 0.3:  # go on from there, as a request with this prefix would
                        request.source, request.live, request.computed = slot, base + end, base + end

    @staticmethod
    def _source(request: Progress) -> int:
        if request.source is not None:
            return request.source
        return request.row if request.computed > 0 else -1

    @staticmethod
    def _assert_state(memory: DeltaMemory[Any], slot: int, text: DeltaText, end: int) -> None:
        np.testing.assert_array_equal(memory.state[slot].view(np.uint32), text.states[end].view(np.uint32))
        np.testing.assert_array_equal(memory.conv[slot], text.convs[end])
