"""Builds what drafting methods look at, after a step was verified and committed. Knows no method."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.step_memory import StepMemory
from fastdeploy_sd.types import I32, RequestId
from fastdeploy_sd.worker.request_table import RequestTable


class DraftInputs:
    """Makes the ProposeInput of step after step.

    Args:
        table: the requests and their tokens.
        has_target: whether a method looks at what the model ran.
    """

    def __init__(self, table: RequestTable, memory: StepMemory, *, has_target: bool) -> None:
        self._table, self._memory, self._has_target = table, memory, has_target
        # The same views while the number of rows is: whoever bound them to a native call need not do so again.
        self._views = self._rows(0)

    def build(self, request_ids: tuple[RequestId, ...]) -> ProposeInput:
        """Return the input of the step that the memory holds, its output committed."""
        n = len(request_ids)
        if n != len(self._views[0]):
            self._views = self._rows(n)
        table_rows, num_tokens, max_draft_len = self._views
        return ProposeInput(
            request_ids=request_ids,
            table_rows=table_rows,
            token_table=self._table.tokens,
            num_tokens=num_tokens,
            max_draft_len=max_draft_len,
            num_draft_logprobs=self._table.num_draft_logprobs.take(table_rows) if self._table.num_reports else None,
            target=self._target_step(n) if self._has_target else None,
        )

    def _rows(self, n: int) -> tuple[I32, I32, I32]:
        m = self._memory
        return m.table_rows[:n], m.num_committed[:n], m.max_draft_len[:n]

    def _target_step(self, n: int) -> TargetStep:
        table, m = self._table, self._memory
        table_rows, computed = m.table_rows[:n], m.num_computed[:n]
        produced = m.cu_num_output[1 : n + 1] > m.cu_num_output[:n]
        unfinished = m.cu_num_logits[1 : n + 1] == m.cu_num_logits[:n]
        # A row whose tokens were all run and that has no output nevertheless has failed.
        num_run = computed + m.num_new[:n] * unfinished
        # The last block may reach past the model's length, where the rotary table ends.
        num_kv_slots = np.minimum(table.num_blocks.take(table_rows) * table.block_size, table.tokens.shape[1])
        return TargetStep(
            query_start_loc=m.query_start_loc[: n + 1],
            num_computed_tokens=computed,
            num_valid=np.where(produced, m.num_committed[:n] - 1, num_run),
            num_kv_slots=num_kv_slots,
        )
