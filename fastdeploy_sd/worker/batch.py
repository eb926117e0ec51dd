"""Fills a step's memory from the plan and the request table, and puts the step's output behind the table's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.ops.batch import APPEND_TOKENS, PREPARE_BATCH
from fastdeploy_sd.runtime.bound_call import Call
from fastdeploy_sd.runtime.twins import NO_TWINS, Twins
from fastdeploy_sd.step_memory import StepMemory
from fastdeploy_sd.types import SchedulerOutput
from fastdeploy_sd.worker.request_table import RequestTable


class BatchBuilder:
    """Does this step after step, in memory that the steps share.

    Args:
        table: the requests and their tokens.
        twins: of the table on a device, which gets the output there.
    """

    def __init__(self, table: RequestTable, memory: StepMemory, twins: Twins = NO_TWINS) -> None:
        m = self._memory = memory
        self._table = table
        self._prepare = PREPARE_BATCH.bind(
            table_rows=m.table_rows,
            token_table=table.tokens,
            num_tokens=table.num_tokens,
            block_tables=table.blocks,
            num_computed=m.num_computed,
            num_new=m.num_new,
            draft_token_ids=m.draft_token_ids,
            cu_num_draft=m.cu_num_draft,
            block_size=table.block_size,
            input_ids=m.input_ids,
            positions=m.positions,
            slot_mapping=m.slot_mapping,
            query_start_loc=m.query_start_loc,
            seq_lens=m.seq_lens,
            logits_indices=m.logits_indices,
            cu_num_logits=m.cu_num_logits,
            batch_id_per_output=m.batch_id_per_output,
            output_positions=m.output_positions,
        )
        appended: dict[str, Any] = {
            "table_rows": m.table_rows,
            "token_ids": m.output_token_ids,
            "cu_num_output": m.cu_num_output,
            "planned_drafts": m.planned_drafts,
            "tokens": table.tokens,
            "num_tokens": table.num_tokens,
            "max_total": table.max_total,
            "count_rows": table.count_rows,
            "token_counts": table.counts.table,
            "num_committed": m.num_committed,
            "max_draft_len": m.max_draft_len,
        }
        self._append = APPEND_TOKENS.bind(**appended)
        self._append_there: Call | None = None if twins is NO_TWINS else twins.bind(APPEND_TOKENS, **appended)

    def build(self, plan: SchedulerOutput) -> None:
        """Write a step's plan, maps and masks into the memory.

        Raises:
            ValueError: the plan is larger than the memory, or contradicts the table (counts, blocks); the text names
                the array.
        """
        m, draft = self._memory, plan.draft
        n, num_drafts = len(plan.request_ids), len(draft.token_ids)
        for name, got, bound in (
            ("request_ids", n, m.limits.num_requests),
            ("draft.token_ids", num_drafts, m.limits.num_drafts),
        ):
            if got > bound:
                raise ValueError(f"{name}: expected at most {bound}, got {got}")
        m.num_requests = n
        m.table_rows[:n] = self._table.table_rows(plan.request_ids)
        m.num_computed[:n] = plan.num_computed_tokens
        m.num_new[:n] = plan.num_new_tokens
        m.planned_drafts[:n] = plan.max_draft_len
        m.draft_token_ids[:num_drafts] = draft.token_ids
        m.cu_num_draft[: n + 1] = draft.cu_num_draft
        if m.cu_num_draft.item(n) != num_drafts:
            raise ValueError(f"draft.cu_num_draft: expected to end at {num_drafts}, got {m.cu_num_draft.item(n)}")
        self._prepare.params.num_requests = n
        self._prepare.run()
        m.num_tokens, m.num_logits = m.query_start_loc.item(n), m.cu_num_logits.item(n)
        self._write_masks()

    def commit(self) -> None:
        """Append every row's output tokens, and say in the memory how many it has and how many may be drafted.

        Raises:
            ValueError: the output has no room in the table, or is outside the vocabulary. Nothing has changed then.
            DeviceLost: the device's table could not follow, so that its tokens are not the requests' any more.
        """
        self._append.params.num_requests = self._memory.num_requests
        self._append.run()  # the host's first: it looks at what it is given
        if self._append_there is not None:
            self._append_there.params.num_requests = self._memory.num_requests
            try:
                self._append_there.run()
            except Exception as error:
                raise DeviceLost(f"the GPU's table of requests is behind the host's: {error}") from error

    def _write_masks(self) -> None:
        """The tokens that each row of logits forbids."""
        m, table = self._memory, self._table
        if not table.num_masks:
            m.cu_mask[: m.num_logits + 1] = 0
            return
        has_mask = table.has_mask.take(m.table_rows[: m.num_requests])
        forbidden: list[Sequence[int]] = [()] * m.num_logits
        for r in has_mask.nonzero()[0].tolist():
            begin, end = m.cu_num_logits.item(r), m.cu_num_logits.item(r + 1)
            if begin < end:
                forbidden[begin:end] = self._forbidden(r, end - begin)
        m.cu_mask[0] = end = 0
        for row, token_ids in enumerate(forbidden):
            begin, end = end, end + len(token_ids)
            m.mask_token_ids[begin:end] = token_ids
            m.cu_mask[row + 1] = end

    def _forbidden(self, r: int, num_rows: int) -> list[Sequence[int]]:
        """What request r may not produce, after none, one ... of its drafts."""
        m, table = self._memory, self._table
        table_row = m.table_rows.item(r)
        rule, num_committed = table.rules[table_row], table.num_tokens.item(table_row)
        num_output = num_committed - rule.num_prompt_tokens
        if not (rule.has_bad_words or num_output < rule.min_tokens):
            return [()] * num_rows
        committed = table.tokens[table_row, max(0, num_committed - rule.num_bad_prefix) : num_committed].tolist()
        drafts = m.draft_token_ids[m.cu_num_draft[r] : m.cu_num_draft[r + 1]].tolist()
        recent = (*committed, *drafts)
        return [rule.forbidden(recent[: len(committed) + j], num_output + j) for j in range(num_rows)]
