"""What gated_delta_net_ takes besides activations: one layer's weights and memory, and which states a step reads.

The classes hold NumPy arrays or Paddle tensors alike and load neither. C = 2 * Hk * dk + Hv * dv are the columns of
q, k and v, with Hk key heads of dk and Hv value heads of dv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

A = TypeVar("A", bound=Any)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights(Generic[A]):
    """One layer's weights.

    Attributes:
        conv: f32[width, C], width is 2..8; checkpoints have it transposed. Its last row multiplies a token itself.
        a_log, dt_bias: f32[Hv].
        norm: f32[dv].
    """

    conv: A
    a_log: A
    dt_bias: A
    norm: A
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class DeltaMemory(Generic[A]):
    """One layer's memory: slots [0, S) are the states of the rows of the request table, the others are snapshots.

    Attributes:
        state: f32[slots, Hv, dk, dv].
        conv: the model's dtype [slots, width - 1, C], the last tokens' rows of q | k | v; zeros before a text.
        drafts: the same dtype [S, D, C + 2 * Hv], rows q | k | v | b | a of a step's drafts.
    """

    state: A
    conv: A
    drafts: A


class DeltaStates(NamedTuple, Generic[A]):
    """Which states a step reads and writes; all i32.

    Attributes:
        table_rows: [R].
        source: [R], slot of the state before the rows: the request's own or a snapshot; -1 = there is no token before.
        num_replayed: [R], rows in DeltaMemory.drafts, the first ones, that come before the step's rows.
        num_certain: [R], rows of the step, the first ones, that are no drafts. The request's own slot gets the state
            after the replayed and the certain rows.
        cu_snapshots: [R + 1], snapshots of each request.
        snapshot_ends: [n], rows after which a state is stored, replayed ones included; 1.., rising within a request.
        snapshot_slots: [n], the slots that get them.
    """

    table_rows: A
    source: A
    num_replayed: A
    num_certain: A
    cu_snapshots: A
    snapshot_ends: A
    snapshot_slots: A
