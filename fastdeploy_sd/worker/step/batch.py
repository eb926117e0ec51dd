"""Fills a step's memory from the plan and the request table, and appends the step's output to the table's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device.device_buffers import HOST_BUFFERS, DeviceBuffers
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.ops.batch import APPEND_TOKENS, PREPARE_BATCH
from fastdeploy_sd.types import I32, DraftTokens, SchedulerOutput, VerifyResult, offsets
from fastdeploy_sd.worker.step.adapter_rows import AdapterRows
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.state_rows import StateRows


class PendingRows:
    """The rows of an in-flight step, after which the next one is prepared before their tokens are known.

    A row with logits gets one token and one per accepted draft, unless it fails.

    Attributes:
        table_rows: i32[R].
        cu_num_logits: i32[R+1]; a row past its prompt has one for each draft and one more.
        num_computed: i32[R], an upper bound until the step before is finished, then exact.
        num_new, planned_drafts: i32[R], of the plan.
        num_kv_slots: i32[R], that the row's blocks hold.
        max_tokens: i32[R], committed tokens after the step, at most.
        is_kept: bool[R]; False = the request was dropped since, and another may have its table row.
        has_drafts: whether drafts are made after it.
        follows: bool[R], whether the step before, also in flight, has the row.
    """

    def __init__(self, memory: StepMemory, table: RequestTable, num_tokens: I32, before: PendingRows | None) -> None:
        n = self.num_requests = memory.num_requests
        self.table_rows, self.cu_num_logits = memory.table_rows[:n].copy(), memory.cu_num_logits[: n + 1].copy()
        self.num_computed, self.num_new = memory.num_computed[:n].copy(), memory.num_new[:n].copy()
        self.planned_drafts = memory.planned_drafts[:n].copy()
        most = table.tokens.shape[1]
        self.num_kv_slots: I32 = np.minimum(table.num_blocks.take(self.table_rows) * table.block_size, most)
        self.is_kept = np.ones(n, np.bool_)
        self.max_tokens = num_tokens.take(self.table_rows) + self.max_output
        self.has_drafts = False
        no_rows = np.zeros(n, np.bool_)
        self.follows = no_rows if before is None else np.isin(self.table_rows, before.table_rows[before.is_kept])

    def drop(self, table_rows: I32) -> None:
        """Note that the requests of some table rows were dropped."""
        self.is_kept &= ~np.isin(self.table_rows, table_rows)

    def resolve_lengths(self, num_tokens: I32) -> None:
        """Note where rows began, when the step before is finished. `num_tokens`: i32[S], committed before this step."""
        np.minimum(self.num_computed, num_tokens.take(self.table_rows) - 1, out=self.num_computed)

    @property
    def max_output(self) -> I32:
        """Return i32[R], the most tokens that each row gets."""
        most: I32 = np.diff(self.cu_num_logits) * self.is_kept
        return most


class _PendingOutput:
    """The output of an in-flight step's rows, as APPEND_TOKENS reads it. `limits`: R and L at most."""

    def __init__(self, limits: StepLimits) -> None:
        num_requests = limits.num_requests
        self.table_rows, self.planned_drafts, self.num_committed, self.max_draft_len = np.zeros(
            (4, num_requests), np.int32
        )
        self.token_ids = np.zeros(limits.num_logits, np.int32)
        self.cu_num_output = np.zeros(num_requests + 1, np.int32)

    def take(self, rows: PendingRows, result: VerifyResult) -> int:
        """Write the output of the kept rows; returns their number."""
        counts = np.diff(result.cu_num_output)
        token_ids = result.token_ids[np.repeat(rows.is_kept, counts)]
        n = int(np.count_nonzero(rows.is_kept))
        self.table_rows[:n] = rows.table_rows[rows.is_kept]
        self.planned_drafts[:n] = rows.planned_drafts[rows.is_kept]
        self.token_ids[: len(token_ids)] = token_ids
        self.cu_num_output[: n + 1] = offsets(counts[rows.is_kept])
        return n


class BatchBuilder:
    """Builds and commits every step, in memory that the steps share.

    Args:
        table: the requests and their tokens.
        buffers: of the table on a device, which gets the output there.
        adapters: None = the model runs with none.
    """

    def __init__(
        self,
        table: RequestTable,
        memory: StepMemory,
        buffers: DeviceBuffers = HOST_BUFFERS,
        adapters: AdapterRows | None = None,
    ) -> None:
        m = self._memory = memory
        self._table, self._adapters = table, adapters
        self._states = StateRows(table, memory) if memory.has_states else None
        is_host = buffers is HOST_BUFFERS
        # On a device: tokens of in-flight steps included.
        self._num_tokens = table.num_tokens if is_host else np.zeros_like(table.num_tokens)
        prepared: dict[str, Any] = {
            "table_rows": m.table_rows,
            "token_table": table.tokens,
            "num_tokens": self._num_tokens,
            "block_tables": table.blocks,
            "num_computed": m.num_computed,
            "num_new": m.num_new,
            "draft_token_ids": m.draft_token_ids,
            "cu_num_draft": m.cu_num_draft,
            "block_size": table.block_size,
            "input_ids": m.input_ids,
            "positions": m.positions,
            "slot_mapping": m.slot_mapping,
            "tree_mask": m.tree_mask,
            "query_start_loc": m.query_start_loc,
            "seq_lens": m.seq_lens,
            "logits_indices": m.logits_indices,
            "cu_num_logits": m.cu_num_logits,
            "batch_id_per_output": m.batch_id_per_output,
            "output_positions": m.output_positions,
            "parent_rows": m.parent_rows,
        }
        self._prepare_chains = PREPARE_BATCH.bind(**prepared)
        self._prepare_trees = PREPARE_BATCH.bind(**prepared, draft_parents=m.draft_parents)
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
        self._append_there: BoundCall | None = None if is_host else buffers.bind(APPEND_TOKENS, **appended)
        if not is_host:
            self._pending_output = _PendingOutput(m.limits)
            self._append_pending = APPEND_TOKENS.bind(**appended | vars(self._pending_output))

    def build(self, plan: SchedulerOutput, before: PendingRows | None = None) -> None:
        """Write a step's plan, maps and masks into the memory.

        `before`: of the step in flight, None = none. Raises ValueError: the plan is larger than the memory, or
        contradicts the table (counts, blocks, states); the text names the array.
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
                kept = before.is_kept
                self._num_tokens[before.table_rows[kept]] += before.max_output[kept]
        m.num_computed[:n] = plan.num_computed_tokens
        m.num_new[:n] = plan.num_new_tokens
        m.planned_drafts[:n] = plan.max_draft_len
        m.draft_token_ids[:num_drafts] = draft.token_ids
        m.cu_num_draft[: n + 1] = draft.cu_num_draft
        if m.cu_num_draft.item(n) != num_drafts:
            raise ValueError(f"draft.cu_num_draft: expected to end at {num_drafts}, got {m.cu_num_draft.item(n)}")
        prepare = self._prepare_chains
        if draft.parents is not None:
            prepare, m.draft_parents[:num_drafts] = self._prepare_trees, draft.parents
        prepare.params.num_requests = n
        prepare.run()
        m.num_tokens, m.num_logits = m.query_start_loc.item(n), m.cu_num_logits.item(n)
        self._write_masks(draft)
        if self._adapters is not None:
            self._adapters.build()
        if self._states is not None:
            self._states.build(plan)

    def open(self, before: PendingRows | None = None) -> PendingRows:
        """Start to append the step's output where the device has the table, before the host knows it.

        `before`: as `build`'s.
        """
        self._start_append()
        return PendingRows(self._memory, self._table, self._num_tokens, before)

    def commit(self) -> None:
        """Append every row's output tokens; write its new length and the most drafts into the memory.

        Raises:
            ValueError: the output has no room in the table, or is outside the vocabulary. Nothing has changed.
            DeviceLost: the device's table could not be updated, so its tokens are wrong.
        """
        self._append.params.num_requests = self._memory.num_requests
        self._append.run()  # the host's first: it verifies its arguments
        if self._states is not None:
            self._states.commit()
        try:
            self._start_append()
        except Exception as error:
            raise DeviceLost(f"the GPU's table of requests lacks tokens of the host's: {error}") from error

    def commit_pending(self, rows: PendingRows, result: VerifyResult) -> tuple[I32, I32]:
        """Append the output of an in-flight step, while the memory may hold another step.

        Returns:
            Committed tokens i32[R] of each row, and the most drafts that may follow i32[R]; 0 for a dropped row.

        Raises ValueError: as `commit`.
        """
        out, kept = self._pending_output, rows.is_kept
        rows.resolve_lengths(self._table.num_tokens)
        n = self._append_pending.params.num_requests = out.take(rows, result)
        self._append_pending.run()
        num_committed, max_draft_len = np.zeros((2, rows.num_requests), np.int32)
        num_committed[kept], max_draft_len[kept] = out.num_committed[:n], out.max_draft_len[:n]
        return num_committed, max_draft_len

    def _start_append(self) -> None:
        if self._append_there is not None:
            self._append_there.params.num_requests = self._memory.num_requests
            self._append_there.run()

    def _write_masks(self, draft: DraftTokens) -> None:
        """Write the tokens that each row of logits forbids."""
        m, table = self._memory, self._table
        if not table.num_masks:
            m.cu_mask[: m.num_logits + 1] = 0
            return
        has_mask = table.has_mask.take(m.table_rows[: m.num_requests])
        forbidden: list[Sequence[int]] = [()] * m.num_logits
        for r in has_mask.nonzero()[0].tolist():
            begin, end = m.cu_num_logits.item(r), m.cu_num_logits.item(r + 1)
            if begin < end:
                forbidden[begin:end] = self._forbidden(r, draft)
        m.cu_mask[0] = end = 0
        for row, token_ids in enumerate(forbidden):
            begin, end = end, end + len(token_ids)
            m.mask_token_ids[begin:end] = token_ids
            m.cu_mask[row + 1] = end

    def _forbidden(self, r: int, draft: DraftTokens) -> list[Sequence[int]]:
        """Return the tokens that request r may not produce, after none of its drafts, and after the path to each."""
        m, table = self._memory, self._table
        table_row = m.table_rows.item(r)
        rule, num_committed = table.rules[table_row], table.num_tokens.item(table_row)
        num_output = num_committed - rule.num_prompt_tokens
        if not (rule.has_bad_words or num_output < rule.min_tokens):
            return [()] * (len(draft.row(r)) + 1)
        committed = table.tokens[table_row, max(0, num_committed - rule.num_bad_prefix) : num_committed].tolist()
        before = [tuple(committed)]
        for token_id, parent in zip(draft.row(r).tolist(), draft.parents_of(r), strict=True):
            before.append((*before[parent + 1], token_id))
        return [rule.forbidden(recent, num_output + len(recent) - len(committed)) for recent in before]
