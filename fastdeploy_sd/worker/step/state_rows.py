"""What a step does with the recurrent states of its requests, written into the step's memory.

A state moves on by the tokens that are certain. Drafts stay beside it as rows until the next step of their request,
which first repeats those that were accepted. So a rejected draft costs nothing, and no state is ever taken back:

    state    [0 ........ live)         tokens in the live state
    plan     [0 ............ computed) the drafts between were accepted
    step     repeat [live, computed), then run the certain tokens; keep the drafts after them as rows
"""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.types import I32, LIVE_STATE, NO_STATE, SchedulerOutput, offsets
from fastdeploy_sd.worker.step.request_table import LOST_STATE, NO_STATE_YET, RequestTable


class StateRows:
    """Knows how many tokens the live states hold.

    Args:
        table: the requests; its columns `state_lens` and `num_state_drafts` are written.
        memory: of a model with states.
    """

    def __init__(self, table: RequestTable, memory: StepMemory) -> None:
        self._table, self._memory = table, memory
        self._after = np.zeros((3, 0), np.int32)

    def build(self, plan: SchedulerOutput) -> None:
        """Write a step's columns; until `commit` the live states of its requests are lost.

        Raises ValueError: the plan contradicts the states, or a step that failed has spoiled one.
        """
        if plan.draft.parents is not None:
            raise ValueError("draft.parents: expected chains, as a state follows one text, got trees")
        m, table, n = self._memory, self._table, self._memory.num_requests
        rows, computed, num_new = m.table_rows[:n], m.num_computed[:n], m.num_new[:n]
        lens, saved = table.state_lens.take(rows), table.num_state_drafts.take(rows)
        initial = np.where(lens == NO_STATE_YET, NO_STATE, LIVE_STATE) if plan.states is None else plan.states.initial
        is_live = initial == LIVE_STATE
        if plan.states is None and computed[~is_live].any():
            raise ValueError(f"num_computed_tokens: expected 0 without a state, got {computed[~is_live].tolist()}")
        if (lens[is_live] == LOST_STATE).any():
            raise ValueError("states: expected live ones, but a failed step has spoiled one")
        replayed = np.where(is_live, computed - lens, 0)
        if (lens[is_live] < 0).any() or (replayed < 0).any() or (replayed > saved * is_live).any():
            raise ValueError(
                f"num_computed_tokens: expected at most {saved.tolist()} accepted drafts after live states of"
                f" {lens.tolist()} tokens, got {computed.tolist()}"
            )
        # A request with a grammar may run its newest token again, so that one is kept with the drafts.
        is_held_back = table.is_guided.take(rows) & (np.diff(m.cu_num_logits[: n + 1]) > 0)
        drafts = np.diff(m.cu_num_draft[: n + 1]) + is_held_back
        of_snapshot = np.where(initial == NO_STATE, NO_STATE, len(table.state_lens) + initial)
        m.state_source[:n] = np.where(is_live, rows, of_snapshot)
        m.num_replayed[:n], m.num_certain[:n] = replayed, num_new - drafts
        self._write_snapshots(plan, computed - replayed, replayed + num_new)
        self._after = np.stack([rows, computed + num_new - drafts, drafts])
        table.state_lens[rows] = LOST_STATE

    def _write_snapshots(self, plan: SchedulerOutput, base: I32, num_rows: I32) -> None:
        """Write those that the step reaches; `base`: tokens in the source states, num_rows: that they move on by."""
        m, n = self._memory, self._memory.num_requests
        if plan.states is None:
            m.cu_snapshots[: n + 1] = 0
            return
        row_of = np.repeat(np.arange(n), np.diff(plan.states.cu_snapshots))
        ends = plan.states.snapshot_ends - base[row_of]
        if (ends < 1).any():
            raise ValueError(f"snapshot_ends: expected ones after {base.tolist()}, got {plan.states.snapshot_ends}")
        is_reached = ends <= num_rows[row_of]
        count = int(is_reached.sum())
        if count > len(m.snapshot_ends):
            raise ValueError(f"snapshot_ends: expected at most {len(m.snapshot_ends)}, got {count}")
        m.cu_snapshots[: n + 1] = offsets(np.bincount(row_of[is_reached], minlength=n))
        m.snapshot_ends[:count] = ends[is_reached]
        m.snapshot_slots[:count] = len(self._table.state_lens) + plan.states.snapshot_ids[is_reached]

    def commit(self) -> None:
        """Note that the step that was built last has run."""
        rows, lens, drafts = self._after
        self._table.state_lens[rows], self._table.num_state_drafts[rows] = lens, drafts
        self._after = self._after[:, :0]
