"""Builds a step's Batch from the plan and the request table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.ops.native.batch import BatchRows, prepare_batch
from fastdeploy_sd.types import EMPTY_I32, I32, Batch, SamplingArrays, SchedulerOutput
from fastdeploy_sd.worker.request_state import RequestTable, SlotRules


def build_batch(plan: SchedulerOutput, table: RequestTable, slots: I32, block_size: int) -> Batch:
    """Return the flat arrays of a step; row r of the plan is slot `slots[r]` of the table.

    Raises:
        ValueError: the plan contradicts the table (counts, blocks); the text names the array.
    """
    num_draft = np.diff(plan.draft.cu_num_draft)
    num_known = table.num_tokens[slots] + num_draft
    max_blocks = int(-(-int((plan.num_computed_tokens + plan.num_new_tokens).max()) // block_size))
    blocks = np.ascontiguousarray(table.blocks[slots, :max_blocks])
    rows = BatchRows(plan.num_computed_tokens, plan.num_new_tokens, num_known, slots, plan.draft, blocks)
    maps = prepare_batch(rows, table.tokens, block_size)
    return Batch(
        request_ids=plan.request_ids,
        block_tables=blocks,
        draft=plan.draft,
        sampling=_sampling(plan, table, slots, maps.cu_num_logits),
        **maps._asdict(),
    )


def _sampling(plan: SchedulerOutput, table: RequestTable, slots: I32, cu_num_logits: I32) -> SamplingArrays:
    rules = [table.rules[slot] for slot in slots.tolist()]
    bias_ids = [rule.bias_token_ids for rule in rules]
    cu_mask, mask_ids = _mask(plan, table, slots, rules, cu_num_logits)
    return SamplingArrays(
        temperature=table.temperature[slots],
        top_k=table.top_k[slots],
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        repetition_penalty=table.repetition[slots],
        presence_penalty=table.presence[slots],
        frequency_penalty=table.frequency[slots],
        seed=table.seed[slots],
        num_logprobs=table.num_logprobs[slots],
        penalty_slot=table.penalty_slot[slots],
        token_counts=table.counts.table,
        cu_bias=_offsets([len(ids) for ids in bias_ids]),
        bias_token_ids=np.concatenate(bias_ids) if bias_ids else EMPTY_I32,
        bias_values=np.concatenate([rule.bias_values for rule in rules]),
        cu_mask=cu_mask,
        mask_token_ids=mask_ids,
    )


def _mask(
    plan: SchedulerOutput, table: RequestTable, slots: I32, rules: list[SlotRules], cu_num_logits: I32
) -> tuple[I32, I32]:
    """Forbidden tokens per logits row; rows of requests without such rules cost nothing."""
    counts = np.zeros(int(cu_num_logits[-1]), np.int32)
    found: list[int] = []
    for r, rule in enumerate(rules):
        if not rule.has_mask:
            continue
        begin, end = int(cu_num_logits[r]), int(cu_num_logits[r + 1])
        num_committed = int(table.num_tokens[slots[r]])
        num_output = num_committed - rule.num_prompt_tokens
        if begin == end or not (rule.has_bad_words or num_output < rule.min_tokens):
            continue
        committed = table.tokens[slots[r], max(0, num_committed - rule.num_bad_prefix) : num_committed]
        recent = (*committed.tolist(), *plan.draft.row(r).tolist())
        for j in range(end - begin):
            forbidden = _forbidden(rule, recent[: len(committed) + j], num_output + j)
            counts[begin + j] = len(forbidden)
            found += forbidden
    return _offsets(counts), np.array(found, np.int32)


def _forbidden(rule: SlotRules, recent: tuple[int, ...], num_output: int) -> list[int]:
    """Return the ids that may not come next.

    Args:
        recent: the last tokens, drafts before the row included: at least as many as a bad word has before its last.
        num_output: how many tokens were produced, these drafts included.
    """
    forbidden = set(rule.bad_tokens)
    if recent:
        forbidden.update(words[-1] for words in rule.bad_words.get(recent[-1], ()) if _ends_with(recent, words[:-1]))
    if num_output < rule.min_tokens:
        forbidden.update(rule.end_token_ids)
    return sorted(forbidden)


def _ends_with(tokens: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    return len(tail) <= len(tokens) and tokens[len(tokens) - len(tail) :] == tail


def _offsets(counts: Sequence[int] | I32) -> I32:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int32)]).astype(np.int32)
