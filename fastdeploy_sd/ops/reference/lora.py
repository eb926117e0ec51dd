"""Meaning of lora_shrink and lora_expand_."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.adapter_slots import AdapterSlots
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.types import F32, I32
from fastdeploy_sd.types.ranges import SliceRule


def lora_shrink(x: Array, slots: I32, adapters: AdapterSlots[Array], slices: SliceRule) -> F32:
    """u[t] = A[slots[t]] . x[t], zeros beyond each part's rank. The sums here are exact, so `slices` change nothing."""
    del slices
    num_parts = adapters.ranks.shape[1]
    max_rank = adapters.a.shape[1] // num_parts
    u = np.zeros((len(x), num_parts, max_rank), np.float32)
    for t, slot in enumerate(slots):
        for part in range(num_parts) if slot >= 0 else ():
            rank = adapters.ranks[slot, part]
            rows = widen(adapters.a[slot, part * max_rank : part * max_rank + rank]).astype(np.float64)
            u[t, part, :rank] = rows @ widen(x[t]).astype(np.float64)
    return u.reshape(len(x), num_parts * max_rank)


def lora_expand_(y: Array, u: F32, slots: I32, adapters: AdapterSlots[Array]) -> None:
    """y[t] += scale * B . u[t] of each part, rounded once."""
    num_parts, begin = adapters.ranks.shape[1], 0
    parts = u.reshape(len(u), num_parts, u.shape[1] // num_parts)
    for part, end in enumerate(adapters.part_ends):
        for t, slot in enumerate(slots):
            rank = adapters.ranks[slot, part] if slot >= 0 else 0
            if rank > 0:
                columns = widen(adapters.b[slot, :rank, begin:end]).astype(np.float64)
                more = adapters.scales[slot, part] * (parts[t, part, :rank].astype(np.float64) @ columns)
                y[t, begin:end] = narrow((widen(y[t, begin:end]) + more).astype(np.float32), y.dtype)
        begin = end
