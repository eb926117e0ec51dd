"""Meaning of mtp_preprocess, mtp_postprocess_ and keep_hidden_."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.ops.mtp_batch import DraftBatch, HiddenRows, KeptRows, MtpInputs, MtpPass, NextInputs, RowMaps
from fastdeploy_sd.runtime.arrays import Array
from fastdeploy_sd.types import F32, I32, I64, offsets


def _slot_mapping(batch: DraftBatch, r: int, positions: I32) -> I64:
    blocks = batch.block_table[batch.table_rows[r], positions // batch.block_size].astype(np.int64)
    return np.asarray(blocks * batch.block_size + positions % batch.block_size, np.int64)


def _hidden_at(batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Array], r: int, position: int) -> Any:
    """The hidden row of a position that request r combines with the token after it."""
    if position < todo.source:
        return np.zeros_like(hidden.step[0])
    if position >= todo.hidden_begin[r]:
        return hidden.step[todo.cu_hidden[r] + position - todo.hidden_begin[r]]
    kept = hidden.kept
    if (position + 1) % batch.block_size == 0:
        return kept.blocks[batch.block_table[batch.table_rows[r], position // batch.block_size]]
    return kept.requests[batch.table_rows[r] * kept.num_kept + position % kept.num_kept]


def mtp_preprocess(batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Array]) -> MtpInputs:
    """Lay out one pass of a draft layer.

    The row at KV slot q combines the token at q, committed or drafted, with the source layer's output at q - 1. A draft
    of -1, which could not be made, is run as token 0. The output comes from this step where the step computed it, and
    else from what was kept: the row of the block that ends there, or the request's. Layer l has no output before
    position l: what would need it gets zeros.

    Args:
        batch: the requests.
        todo: what they compute.
        hidden: rows of the source layer.
    """
    num_requests = len(batch.table_rows)
    positions = [np.arange(todo.begin[r], todo.end[r], dtype=np.int32) for r in range(num_requests)]
    texts = [
        np.concatenate(
            [
                batch.token_table[batch.table_rows[r], : batch.num_committed[r]],
                batch.draft_token_ids[batch.cu_num_draft[r] : batch.cu_num_draft[r + 1]].clip(0),
            ]
        )
        for r in range(num_requests)
    ]
    counts = todo.end - todo.begin
    query_start_loc = offsets(counts)
    drafting = np.diff(batch.cu_num_draft) > todo.source
    gathered = [
        _hidden_at(batch, todo, hidden, r, int(q) - 1).copy() for r in range(num_requests) for q in positions[r]
    ]
    return MtpInputs(
        input_ids=_flat([texts[r][positions[r]] for r in range(num_requests)], np.int32),
        positions=_flat(positions, np.int32),
        slot_mapping=_flat([_slot_mapping(batch, r, positions[r]) for r in range(num_requests)], np.int64),
        query_start_loc=query_start_loc,
        seq_lens=todo.end.copy(),
        draft_rows=query_start_loc[1:][drafting] - 1,
        hidden=np.array(gathered, hidden.step.dtype).reshape(-1, hidden.step.shape[1]),
    )


def keep_hidden_(blocks: RequestBlocks[Array], maps: RowMaps, hidden: Array, kept: KeptRows[Array]) -> None:
    """Keep a pass's newest hidden rows for passes of draft layers in later steps, in place.

    Of every request the last `num_kept`, and those that end a block. A position that is computed again, as its token
    was a rejected draft, replaces its row.

    Args:
        hidden: [T, H], the pass's rows.
        kept: `blocks` and `requests` are written.
    """
    q, seq_lens = maps.query_start_loc, maps.seq_lens
    for r, table_row in enumerate(blocks.table_rows):
        rows = hidden[q[r] : q[r + 1]]
        for position, row in enumerate(rows, start=int(seq_lens[r]) - len(rows)):
            kept.requests[table_row * kept.num_kept + position % kept.num_kept] = row
            if (position + 1) % kept.block_size == 0:
                kept.blocks[blocks.block_tables[table_row, position // kept.block_size]] = row


def _flat(parts: Sequence[Array], dtype: type) -> Array:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def mtp_postprocess_(batch: DraftBatch, step: int, logits: F32, hidden: Array) -> NextInputs:
    """Write draft `step` of every drafting request, in place, and lay out the pass that continues after it.

    The draft is the most likely token, ties going to the lowest id; -1 where a logit is NaN or +inf or all are -inf,
    and then token 0 is run next. Draft i of a request stands at position num_committed + i and is the token of KV slot
    num_committed + i; requests that get no more drafts have no row. A request gets none when the product of its drafts'
    probabilities is below its `min_survival`; that of -1 is 0.

    Args:
        batch: the requests; `draft_token_ids`, `num_wanted` and `draft_prob` are written.
        step: from 0.
        logits: f32[A, V], a row for every request that wants more than `step` drafts.
        hidden: [A, H], the draft layer's output that the next pass reads.
    """
    drafting = np.flatnonzero(batch.num_wanted > step)
    is_valid = ~(np.isnan(logits) | (logits == np.inf)).any(axis=1) & (logits > -np.inf).any(axis=1)
    drafts = np.where(is_valid, np.where(is_valid[:, None], logits, 0.0).argmax(axis=1), -1).astype(np.int32)
    batch.draft_token_ids[batch.cu_num_draft[drafting] + step] = drafts
    for row, r in enumerate(drafting):
        if batch.min_survival[r] >= 0:
            first = batch.cu_num_draft[r]
            batch.draft_prob[first + step] = _probability_of_best(logits[row]) if is_valid[row] else 0.0
            if batch.draft_prob[first : first + step + 1].prod(dtype=np.float32) < batch.min_survival[r]:
                batch.num_wanted[r] = step + 1
    goes_on = batch.num_wanted > step + 1
    kept = goes_on[drafting]
    positions = (batch.num_committed[goes_on] + step).astype(np.int32)
    slots = [_slot_mapping(batch, int(r), positions[i : i + 1]) for i, r in enumerate(np.flatnonzero(goes_on))]
    return NextInputs(
        input_ids=drafts[kept].clip(0),
        positions=positions,
        slot_mapping=_flat(slots, np.int64),
        query_start_loc=offsets(goes_on.astype(np.int32)),
        seq_lens=np.where(goes_on, batch.num_committed + step + 1, 0).astype(np.int32),
        hidden=hidden[kept],
        num_continued=np.array([goes_on.sum()], np.int32),
    )


def _probability_of_best(logits: F32) -> float:
    wide = logits.astype(np.float64)
    return float(1.0 / np.exp(wide - wide.max()).sum())
