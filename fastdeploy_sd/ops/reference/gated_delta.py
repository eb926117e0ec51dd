"""Meaning of gated_delta_net_."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.bf16 import narrow, widen
from fastdeploy_sd.ops.delta_memory import DeltaMemory, DeltaStates, DeltaWeights
from fastdeploy_sd.types import F32, I32

F64 = npt.NDArray[np.float64]
_UNIT_EPS = 1e-6


def gated_delta_net_(
    qkvz: Array,
    ba: Array,
    weights: DeltaWeights[F32],
    memory: DeltaMemory[Array],
    states: DeltaStates[I32],
    query_start_loc: I32,
) -> Array:
    """Run every request's rows through the delta rule, one after the other. Source: arXiv:2412.06464, equation 10."""
    num_columns, value_width = weights.conv.shape[1], weights.a_log.size * weights.norm.size
    y = np.zeros((len(qkvz), value_width), qkvz.dtype)
    for r, (table_row, source, num_replayed, num_certain) in enumerate(zip(*states[:4], strict=True)):
        mine = slice(query_start_loc[r], query_start_loc[r + 1])
        if mine.start == mine.stop:
            continue
        step = np.concatenate([qkvz[mine, :num_columns], ba[mine]], axis=1)
        rows = np.concatenate([memory.drafts[table_row, :num_replayed], step])
        before = memory.conv[source] if source >= 0 else np.zeros_like(memory.conv[0])
        first = memory.state[source] if source >= 0 else np.zeros_like(memory.state[0])
        history = np.concatenate([before, rows[:, :num_columns]])
        outputs, after = [], [first.astype(np.float64)]
        for output, state in _rows(history, rows[:, num_columns:], after[0], weights):
            outputs.append(output)
            after.append(state)
        mine_snapshots = slice(states.cu_snapshots[r], states.cu_snapshots[r + 1])
        ends = [*states.snapshot_ends[mine_snapshots], num_replayed + num_certain]
        for end, slot in zip(ends, [*states.snapshot_slots[mine_snapshots], table_row], strict=True):
            memory.state[slot] = after[end].astype(np.float32)
            memory.conv[slot] = history[end : end + len(before)]
        drafts = rows[num_replayed + num_certain :]
        memory.drafts[table_row, : len(drafts)] = drafts
        z = widen(qkvz[mine, num_columns:]).astype(np.float64)
        y[mine] = narrow(_gated_norm(np.stack(outputs[num_replayed:]), z, weights), y.dtype)
    return y


def _rows(history: Array, gates: Array, state: F64, weights: DeltaWeights[F32]) -> Iterator[tuple[F64, F64]]:
    """Each row's output [Hv, dv] and the state [Hv, dk, dv] after it; history has width - 1 rows before the first."""
    num_heads, key_dim, value_dim = state.shape
    width, num_columns = weights.conv.shape
    num_key_heads = (num_columns - num_heads * value_dim) // (2 * key_dim)
    wide, beta_in, a = widen(history).astype(np.float64), *np.split(widen(gates).astype(np.float64), 2, axis=1)
    beta = _sigmoid(beta_in)
    decay = np.exp(-np.exp(weights.a_log.astype(np.float64)) * np.logaddexp(0.0, a + weights.dt_bias))
    for row in range(len(gates)):
        mixed = (wide[row : row + width] * weights.conv).sum(axis=0)
        mixed *= _sigmoid(mixed)
        q, k, v = np.split(mixed, [num_key_heads * key_dim, 2 * num_key_heads * key_dim])
        q, k = (np.repeat(_unit(x.reshape(num_key_heads, key_dim)), num_heads // num_key_heads, axis=0) for x in (q, k))
        state = state * decay[row, :, None, None]
        read = np.einsum("hkv,hk->hv", state, k)
        update = beta[row, :, None] * (v.reshape(num_heads, value_dim) - read)
        state = state + k[:, :, None] * update[:, None, :]
        yield np.einsum("hkv,hk->hv", state, q) / np.sqrt(key_dim), state


def _unit(x: F64) -> F64:
    return np.asarray(x / np.sqrt((x * x).sum(axis=1, keepdims=True) + _UNIT_EPS))


def _gated_norm(x: F64, z: F64, weights: DeltaWeights[F32]) -> F32:
    """The norm of each head of x [T, Hv, dv], times silu(z), [T, Hv * dv]."""
    normed = x / np.sqrt(np.mean(x * x, axis=2, keepdims=True) + weights.eps) * weights.norm
    return np.asarray(normed.reshape(z.shape) * z * _sigmoid(z), np.float32)


def _sigmoid(x: F64) -> F64:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))
