"""Builds the input of drafting methods, after a step was verified and committed. Knows no method."""

from __future__ import annotations

from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.ops.batch import TARGET_STEP
from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import I32, RequestId
from fastdeploy_sd.worker.step.request_table import RequestTable


class DraftInputs:
    """Makes the ProposeInput of every step.

    Args:
        table: the requests and their tokens.
        has_target: whether a method reads what the model ran.
    """

    def __init__(self, table: RequestTable, memory: StepMemory, *, has_target: bool) -> None:
        m = self._memory = memory
        self._table = table
        self._find_target = (
            TARGET_STEP.bind(
                table_rows=m.table_rows,
                num_computed=m.num_computed,
                num_new=m.num_new,
                cu_num_logits=m.cu_num_logits,
                cu_num_output=m.cu_num_output,
                num_committed=m.num_committed,
                num_blocks=table.num_blocks,
                block_size=table.block_size,
                max_tokens_per_row=table.tokens.shape[1],
                num_valid=m.num_valid,
                num_kv_slots=m.num_kv_slots,
            )
            if has_target
            else None
        )
        # Kept while the number of rows and the requests are the same, so a native call stays bound to them.
        self._views, self._target = self._rows(0), self._target_rows(0)
        self._latest: ProposeInput | None = None

    def build(self, request_ids: tuple[RequestId, ...]) -> ProposeInput:
        """Return the input of the step that the memory holds, its output committed.

        `request_ids`: of its rows; the same object as in the step before only where the requests are the same.
        """
        n, latest, has_reports = len(request_ids), self._latest, self._table.num_reports > 0
        if self._find_target is not None:
            self._find_target.params.num_requests = n
            self._find_target.run()
        if latest is not None and latest.request_ids is request_ids and not has_reports:
            return latest
        if n != len(self._views[0]):
            self._views, self._target = self._rows(n), self._target_rows(n)
        table_rows, num_tokens, max_draft_len = self._views
        x = ProposeInput(
            request_ids=request_ids,
            table_rows=table_rows,
            token_table=self._table.tokens,
            num_tokens=num_tokens,
            max_draft_len=max_draft_len,
            num_draft_logprobs=self._table.num_draft_logprobs.take(table_rows) if has_reports else None,
            target=self._target,
        )
        self._latest = None if has_reports else x
        return x

    def _rows(self, n: int) -> tuple[I32, I32, I32]:
        m = self._memory
        return m.table_rows[:n], m.num_committed[:n], m.max_draft_len[:n]

    def _target_rows(self, n: int) -> TargetStep | None:
        if self._find_target is None:
            return None
        m = self._memory
        return TargetStep(m.query_start_loc[: n + 1], m.num_computed[:n], m.num_valid[:n], m.num_kv_slots[:n])
