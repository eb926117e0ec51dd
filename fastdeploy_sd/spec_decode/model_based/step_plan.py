"""The host's plan of a drafting step: which KV slots of the draft layers it fills, and how many drafts it makes."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.mtp import MTP_COLLECT, MTP_PLAN
from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory
from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import I32


class StepPlan:
    """Plans step after step, and notes what was filled.

    Args:
        memory: where the plan is written.
        next_slot, num_begun: i32[S], by table row; see MTP_PLAN. The first is changed.
        num_steps: drafts per request at most.
    """

    def __init__(self, memory: DraftMemory, next_slot: I32, num_begun: I32, num_steps: int, block_size: int) -> None:
        m = self._memory = memory
        num_layers = len(m.ends)
        drafts = {"cu_num_draft": m.cu_num_draft, "draft_token_ids": m.draft_token_ids}
        self._plan = MTP_PLAN.bind(
            **drafts,
            table_rows=m.table_rows,
            num_committed=m.num_committed,
            max_draft_len=m.max_draft_len,
            num_computed=m.hidden_begin,
            num_valid=m.num_valid,
            num_kv_slots=m.num_kv_slots,
            next_slot=next_slot,
            num_begun=num_begun,
            num_steps=num_steps,
            max_position=0,
            block_size=block_size,
            begin=m.begin,
            ends=m.ends,
            num_wanted=m.num_wanted,
            draft_start_loc=m.draft_start_loc,
            num_filling=m.counts[:1],
            num_tokens=m.counts[1 : 1 + num_layers],
            num_drafting=m.counts[1 + num_layers :],
        )
        self._collect = MTP_COLLECT.bind(
            **drafts,
            table_rows=m.table_rows,
            begin=m.begin,
            end=m.ends[0],
            next_slot=next_slot,
            draft_prob=m.draft_prob,
            kept=m.kept,
        )

    def make(self, x: ProposeInput, step: TargetStep) -> bool:
        """Write the plan of the draft layers into the memory; returns whether they compute anything."""
        m, n = self._memory, len(x.table_rows)
        limits = x.max_draft_len
        if x.prefix is not None:
            limits = np.where(np.diff(x.prefix.cu_num_draft) == 0, limits, 0).astype(np.int32)
        m.count = n
        m.table_rows[:n], m.num_committed[:n], m.max_draft_len[:n] = x.table_rows, x.num_tokens, limits
        m.hidden_begin[:n], m.cu_hidden[: n + 1] = step.num_computed_tokens, step.query_start_loc
        m.num_valid[:n], m.num_kv_slots[:n] = step.num_valid, step.num_kv_slots
        params = self._plan.params
        params.num_requests, params.max_position = n, x.token_table.shape[1]
        self._plan.run()
        return m.take_counts()

    def collect(self) -> None:
        """Note which slots are filled, and close the gaps of drafts that were not made."""
        self._collect.params.num_requests = self._memory.count
        self._collect.run()
