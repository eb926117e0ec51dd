"""Builds a step's Batch from the plan and the request table."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.native.batch import BatchMapper, BatchMaps, BatchRows
from fastdeploy_sd.types import I32, Batch, DraftTokens, SamplingArrays, SchedulerOutput
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
        self._draft: DraftTokens | None = None
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
        draft, blocks = self._draft_of(plan), self._table.block_tables(members)
        num_computed, num_new, num_known = members.counts
        num_computed[:] = plan.num_computed_tokens
        num_new[:] = plan.num_new_tokens
        # A loop, not columns: with cold caches it takes less time, up to some hundred rows.
        cu_num_draft = draft.cu_num_draft.tolist()
        for r, slot in enumerate(members.slots.tolist()):
            num_known[r] = self._table.num_tokens.item(slot) + cu_num_draft[r + 1] - cu_num_draft[r]
        rows = self._rows
        if (
            rows is None
            or rows.slots is not members.slots
            or rows.draft is not draft
            or rows.block_tables is not blocks
        ):
            return BatchRows(num_computed, num_new, num_known, members.slots, draft, blocks)
        return rows

    def _draft_of(self, plan: SchedulerOutput) -> DraftTokens:
        """The drafts to judge; the same object as last time if there are as many of as many rows."""
        draft, last = plan.draft, self._draft
        if len(draft.token_ids) == 0:
            return draft
        if last is None or len(draft.cu_num_draft) != len(last.cu_num_draft) or _num_drafts(draft) != _num_drafts(last):
            last = self._draft = DraftTokens(draft.token_ids.copy(), draft.cu_num_draft.copy())
        else:
            last.token_ids[:] = draft.token_ids
            last.cu_num_draft[:] = draft.cu_num_draft
        return last


def _num_drafts(draft: DraftTokens) -> tuple[int, int]:
    """As the tokens and as the offsets say: the maps are made only if both agree."""
    return len(draft.token_ids), int(draft.cu_num_draft[-1])


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
