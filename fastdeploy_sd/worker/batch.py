"""Fills a step's memory from the plan and the request table, and puts the step's output behind the table's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.ops.batch import APPEND_TOKENS, PREPARE_BATCH
from fastdeploy_sd.runtime.bound_call import Call
from fastdeploy_sd.runtime.twins import HOST_TWINS, Twins
from fastdeploy_sd.step_memory import StepMemory
from fastdeploy_sd.types import I32, SchedulerOutput, VerifyResult, offsets
from fastdeploy_sd.worker.request_table import RequestTable


class OpenRows:
    """The rows of a step that runs, of which the next one is prepared before their tokens are known.

    Without drafts, a row that is due gets one token, unless it fails.

    Attributes:
        num_requests: R.
        table_rows: i32[R].
        cu_num_logits: i32[R+1]; a row that is due has one.
        is_kept: bool[R]; False = the request was dropped since, and its table row may be another's.
    """

    def __init__(self, memory: StepMemory) -> None:
        n = self.num_requests = memory.num_requests
        self.table_rows, self.cu_num_logits = memory.table_rows[:n].copy(), memory.cu_num_logits[: n + 1].copy()
        self.is_kept = np.ones(n, np.bool_)

    def drop(self, table_rows: I32) -> None:
        """Note that the requests of some table rows were dropped."""
        self.is_kept &= ~np.isin(self.table_rows, table_rows)

    @property
    def due_table_rows(self) -> I32:
        """Of the rows that get a token, and are kept."""
        due: I32 = self.table_rows[(np.diff(self.cu_num_logits) > 0) & self.is_kept]
        return due


class _OpenOutput:
    """The output of open rows, as APPEND_TOKENS reads it.

    Args:
        num_requests: R at most.
    """

    def __init__(self, num_requests: int) -> None:
        self.table_rows, self.token_ids, self.planned_drafts, self.num_committed, self.max_draft_len = np.zeros(
            (5, num_requests), np.int32
        )
        self.cu_num_output = np.zeros(num_requests + 1, np.int32)

    def take(self, rows: OpenRows, result: VerifyResult) -> int:
        """Write the output of the rows that are kept; returns how many these are."""
        counts = np.diff(result.cu_num_output)
        token_ids = result.token_ids[np.repeat(rows.is_kept, counts)]
        n = int(np.count_nonzero(rows.is_kept))
        self.table_rows[:n] = rows.table_rows[rows.is_kept]
        self.token_ids[: len(token_ids)] = token_ids
        self.cu_num_output[: n + 1] = offsets(counts[rows.is_kept])
        return n


class BatchBuilder:
    """Does this step after step, in memory that the steps share.

    Args:
        table: the requests and their tokens.
        twins: of the table on a device, which gets the output there.
    """

    def __init__(self, table: RequestTable, memory: StepMemory, twins: Twins = HOST_TWINS) -> None:
        m = self._memory = memory
        self._table = table
        is_host = twins is HOST_TWINS
        # Of a device's steps: committed, or on their way.
        self._num_tokens = table.num_tokens if is_host else np.zeros_like(table.num_tokens)
        self._prepare = PREPARE_BATCH.bind(
            table_rows=m.table_rows,
            token_table=table.tokens,
            num_tokens=self._num_tokens,
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
        self._append_there: Call | None = None if is_host else twins.bind(APPEND_TOKENS, **appended)
        if not is_host:
            self._open_output = _OpenOutput(m.limits.num_requests)
            self._append_open = APPEND_TOKENS.bind(**appended | vars(self._open_output))

    def build(self, plan: SchedulerOutput, before: OpenRows | None = None) -> None:
        """Write a step's plan, maps and masks into the memory.

        Args:
            before: of the step that is under way, None = there is none.

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
        rows = m.table_rows[:n]
        rows[:] = self._table.table_rows(plan.request_ids)
        if self._num_tokens is not self._table.num_tokens:
            self._num_tokens[rows] = self._table.num_tokens.take(rows)
            if before is not None:
                self._num_tokens[before.due_table_rows] += 1
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

    def open(self) -> OpenRows:
        """Start to append the step's output where the device has the table, before the host knows it."""
        self._start_append()
        return OpenRows(self._memory)

    def commit(self) -> None:
        """Append every row's output tokens, and say in the memory how many it has and how many may be drafted.

        Raises:
            ValueError: the output has no room in the table, or is outside the vocabulary. Nothing has changed then.
            DeviceLost: the device's table could not follow, so that its tokens are not the requests' any more.
        """
        self._append.params.num_requests = self._memory.num_requests
        self._append.run()  # the host's first: it looks at what it is given
        try:
            self._start_append()
        except Exception as error:
            raise DeviceLost(f"the GPU's table of requests is behind the host's: {error}") from error

    def commit_open(self, rows: OpenRows, result: VerifyResult) -> None:
        """Append the output of a step that was opened, where another one may be in the memory.

        Raises:
            ValueError: as `commit`.
        """
        self._append_open.params.num_requests = self._open_output.take(rows, result)
        self._append_open.run()

    def _start_append(self) -> None:
        if self._append_there is not None:
            self._append_there.params.num_requests = self._memory.num_requests
            self._append_there.run()

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
