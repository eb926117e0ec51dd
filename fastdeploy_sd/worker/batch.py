"""Builds a step's Batch from the plan and the request table."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.native.batch import BatchRows, prepare_batch
from fastdeploy_sd.types import I32, Batch, SamplingArrays, SchedulerOutput
from fastdeploy_sd.worker.membership import Membership
from fastdeploy_sd.worker.request_state import RequestTable
from fastdeploy_sd.worker.slot_rules import offsets


def build_batch(plan: SchedulerOutput, table: RequestTable, members: Membership, block_size: int) -> Batch:
    """Return the flat arrays of a step.

    Args:
        members: those of the plan, from the table.

    Raises:
        ValueError: the plan contradicts the table (counts, blocks); the text names the array.
    """
    draft, num_known = plan.draft, table.num_tokens.take(members.slots)
    num_known += draft.cu_num_draft[1:] - draft.cu_num_draft[:-1]
    blocks = table.block_tables(members)
    rows = BatchRows(plan.num_computed_tokens, plan.num_new_tokens, num_known, members.slots, draft, blocks)
    maps = prepare_batch(rows, table.tokens, block_size)
    return Batch(
        request_ids=plan.request_ids,
        input_ids=maps.input_ids,
        positions=maps.positions,
        slot_mapping=maps.slot_mapping,
        query_start_loc=maps.query_start_loc,
        seq_lens=maps.seq_lens,
        block_tables=blocks,
        logits_indices=maps.logits_indices,
        cu_num_logits=maps.cu_num_logits,
        batch_id_per_output=maps.batch_id_per_output,
        draft=draft,
        sampling=_sampling(plan, table, members, maps.cu_num_logits),
    )


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
