"""Builds a step's Batch from the plan and the request table."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.native.batch import BatchMapper, BatchMaps, BatchRows
from fastdeploy_sd.types import I32, Batch, SamplingArrays, SchedulerOutput
from fastdeploy_sd.worker.membership import Membership
from fastdeploy_sd.worker.request_state import RequestTable
from fastdeploy_sd.worker.slot_rules import offsets


class BatchBuilder:
    """Makes the Batch of step after step, in memory that the steps share.

    Args:
        table: the requests and their tokens.
    """

    def __init__(self, table: RequestTable, block_size: int) -> None:
        self._table = table
        self._mapper = BatchMapper(table.tokens, block_size)
        # Of the last step.
        self._rows: BatchRows | None = None
        self._maps: BatchMaps | None = None
        self._last: Batch | None = None

    def build(self, plan: SchedulerOutput, members: Membership) -> Batch:
        """Return the flat arrays of a step. They hold until the next one, which gets the same Batch if it differs only
        in what is in them.

        Args:
            members: those of the plan, from the table.

        Raises:
            ValueError: the plan contradicts the table (counts, blocks); the text names the array.
        """
        rows = self._rows_of(plan, members)
        maps = self._mapper.prepare(rows)
        sampling = _sampling(plan, self._table, members, maps.cu_num_logits)
        last = self._last
        if last is None or rows is not self._rows or maps is not self._maps or sampling is not last.sampling:
            last = self._last = Batch(
                request_ids=plan.request_ids,
                block_tables=rows.block_tables,
                draft=rows.draft,
                sampling=sampling,
                **maps._asdict(),
            )
            self._rows, self._maps = rows, maps
        return last

    def _rows_of(self, plan: SchedulerOutput, members: Membership) -> BatchRows:
        """What each request runs; the same object as long as requests, blocks and drafts are."""
        draft, blocks = plan.draft, self._table.block_tables(members)
        num_computed, num_new, num_known = members.counts
        num_computed[:] = plan.num_computed_tokens
        num_new[:] = plan.num_new_tokens
        # Every slot is one of the table's; the default mode would make a copy.
        self._table.num_tokens.take(members.slots, out=num_known, mode="clip")
        if len(draft.token_ids):
            num_known += draft.cu_num_draft[1:] - draft.cu_num_draft[:-1]
        rows = self._rows
        if (
            rows is None
            or rows.slots is not members.slots
            or rows.draft is not draft
            or rows.block_tables is not blocks
        ):
            return BatchRows(num_computed, num_new, num_known, members.slots, draft, blocks)
        return rows


def _sampling(plan: SchedulerOutput, table: RequestTable, members: Membership, cu_num_logits: I32) -> SamplingArrays:
    """The members' parameters, with the tokens that each logits row forbids."""
    if not members.masked_rows:
        return members.unmasked_sampling(int(cu_num_logits[-1]))
    counts = np.zeros(int(cu_num_logits[-1]), np.int32)
    found: list[int] = []
    for r, rule in members.masked_rows:
        begin, end = int(cu_num_logits[r]), int(cu_num_logits[r + 1])
        slot = members.slots[r]
        num_committed = int(table.num_tokens[slot])
        num_output = num_committed - rule.num_prompt_tokens
        if begin == end or not (rule.has_bad_words or num_output < rule.min_tokens):
            continue
        committed = table.tokens[slot, max(0, num_committed - rule.num_bad_prefix) : num_committed]
        recent = (*committed.tolist(), *plan.draft.row(r).tolist())
        for j in range(end - begin):
            forbidden = rule.forbidden(recent[: len(committed) + j], num_output + j)
            counts[begin + j] = len(forbidden)
            found += forbidden
    return members.masked_sampling(offsets(counts), np.array(found, np.int32))
