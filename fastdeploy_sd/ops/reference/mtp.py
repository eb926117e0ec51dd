"""Meaning of mtp_plan, mtp_collect_, mtp_hold_, mtp_preprocess, mtp_postprocess_ and keep_hidden_."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.ops.mtp_batch import (
    DraftBatch,
    HiddenRows,
    HiddenStateBuffer,
    MaskedRows,
    MtpInputs,
    MtpPass,
    NextInputs,
    RowMaps,
)
from fastdeploy_sd.types import F32, I32, I64, offsets


class MtpPlan(NamedTuple):
    """What the passes of a step compute.

    Attributes:
        begin: i32[R], the first slot that every layer fills.
        ends: i32[num_layers, R], past the last one.
        cu_num_draft: i32[R+1]; num_wanted: i32[R], drafts of each request.
        draft_start_loc: i32[R+1], how many requests before r get a draft from the last layer.
        draft_token_ids: i32[D], -1.
        num_filling: i32[1], requests that fill a slot.
        num_tokens: i32[num_layers], slots that each layer fills.
        num_drafting: i32[num_counts], requests that get more than i drafts, by i.
    """

    begin: I32
    ends: I32
    cu_num_draft: I32
    num_wanted: I32
    draft_start_loc: I32
    draft_token_ids: I32
    num_filling: I32
    num_tokens: I32
    num_drafting: I32


def mtp_plan(  # noqa: PLR0913, PLR0917 (columns)
    table_rows: I32,
    num_committed: I32,
    max_draft_len: I32,
    num_computed: I32,
    num_valid: I32,
    num_kv_slots: I32,
    next_slot: I32,
    num_begun: I32,
    num_steps: int,
    max_position: int,
    block_size: int,
    max_filled: int,
    num_newest: int,
    num_more: int,
    reads_hidden: int,
    num_layers: int,
) -> MtpPlan:
    """Say which KV slots of the draft layers a step fills, and how many drafts each request gets.

    A slot needs its token, the hidden row before it, and a block. Filling waits until the request is drafted for. With
    `reads_hidden` it does not wait along a prompt, of which more rows are computed than kept, and not when the
    request's newest block is full. Layer 0 fills at most `max_filled` slots, the requests' in order; a request that
    gets fewer than it needs does not draft. Of each request it needs at most the `num_newest` last ones. Drafts need
    `num_more` slots after the last one that makes a draft when each makes the next.

    Columns are those of `proposer.ProposeInput` and `proposer.TargetStep`. next_slot i32[S] is the first slot that is
    not filled, -1 for a row of another method; num_begun i32[S], tokens when drafting began.
    """
    first_slot = next_slot[table_rows]
    end = np.minimum(np.minimum(num_valid + 1, num_committed), num_kv_slots)
    can_run = (first_slot >= 0) & (num_valid > num_computed)
    # Draft i is made at slot num_committed - 1 + i, which needs a block and a position.
    room = np.minimum(num_kv_slots, max_position) - num_committed + 1 - num_more
    room = np.minimum(np.minimum(max_draft_len, num_steps), room).clip(0)
    num_drafts = np.where(can_run & (end == num_committed), room, 0)
    cannot_wait = (num_computed < num_begun[table_rows]) | (first_slot // block_size < num_valid // block_size)
    begin = np.maximum(first_slot, reads_hidden)
    end = np.where(can_run & ((num_drafts > 0) | (cannot_wait & bool(reads_hidden))), end, begin)
    begin = np.maximum(begin, end - num_newest)
    needed = end - begin
    filled = np.minimum(needed, (max_filled - offsets(needed)[:-1]).clip(0))
    num_drafts = np.where(filled < needed, 0, num_drafts)
    end = begin + filled
    layers = np.arange(num_layers)[:, None]
    ends = end + np.where(num_drafts > layers, layers, 0)
    counts = np.arange(max(num_layers, num_steps) + 1)
    return MtpPlan(
        begin=begin,
        ends=ends.astype(np.int32),
        cu_num_draft=offsets(num_drafts),
        num_wanted=num_drafts.astype(np.int32),
        draft_start_loc=offsets(num_drafts >= num_layers),
        draft_token_ids=np.full(num_drafts.sum(), -1, np.int32),
        num_filling=np.array([(end > begin).sum()], np.int32),
        num_tokens=(ends - begin).sum(axis=1).astype(np.int32),
        num_drafting=(num_drafts > counts[:, None]).sum(axis=1).astype(np.int32),
    )


def mtp_collect_(  # noqa: PLR0913, PLR0917 (columns)
    table_rows: I32, begin: I32, end: I32, next_slot: I32, cu_num_draft: I32, draft_token_ids: I32, draft_prob: F32
) -> I32:
    """Note which slots a step has filled, and let a request's drafts end before the first that was not made, -1.

    Layer 0 has filled [begin, end); next_slot is written; the drafts that are left are moved to the front.

    Returns:
        i32[n], where each draft that is left was.
    """
    for table_row, first, past in zip(table_rows, begin, end, strict=True):
        if past > first:
            next_slot[table_row] = past
    rows = [draft_token_ids[cu_num_draft[r] : cu_num_draft[r + 1]] for r in range(len(table_rows))]
    lengths = [int(np.append(row < 0, True).argmax()) for row in rows]
    kept = _flat([np.arange(first, first + n) for first, n in zip(cu_num_draft, lengths, strict=False)], np.int32)
    cu_num_draft[:] = offsets(lengths)
    for column in (draft_token_ids, draft_prob):
        column[: len(kept)] = column[kept]
    return np.asarray(kept, np.int32)


def mtp_hold_(  # noqa: PLR0913, PLR0917 (columns)
    table_rows: I32, begin: I32, end: I32, cu_num_draft: I32, draft_token_ids: I32, next_slot: I32, made_drafts: I32
) -> None:
    """Keep what the passes of a step have made by table row, where the next step finds it.

    Layer 0 has filled [begin, end). A draft of -1 was not made; made_drafts is 0 where there is none.
    """
    for r, table_row in enumerate(table_rows):
        if end[r] > begin[r]:
            next_slot[table_row] = end[r]
        drafts = draft_token_ids[cu_num_draft[r] : cu_num_draft[r + 1]]
        made_drafts[table_row] = 0
        made_drafts[table_row, : len(drafts)] = drafts.clip(0)


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


def mtp_preprocess(
    batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Array], block: MaskedRows[Array] | None = None
) -> MtpInputs:
    """Lay out one pass of a draft layer.

    The row at KV slot q combines the token at q, committed or drafted, with the source layer's output at q - 1. A draft
    of -1, which could not be made, is run as token 0. The output comes from this step where the step computed it, and
    else from what was kept: the row of the block that ends there, or the request's. Layer l has no output before
    position l: what would need it gets zeros. For `block` see MaskedRows.
    """
    num_requests, num_drafts = len(batch.table_rows), np.diff(batch.cu_num_draft)
    end, drafting, shift = todo.end, (num_drafts > todo.source).astype(np.int32), 0
    if block is not None:
        end = (end + np.where(num_drafts > 0, num_drafts + block.more_rows, 0)).astype(np.int32)
        drafting, shift = num_drafts, block.token_shift
    positions = [np.arange(todo.begin[r], end[r], dtype=np.int32) for r in range(num_requests)]
    texts = []
    for r in range(num_requests):
        drafts = batch.draft_token_ids[batch.cu_num_draft[r] : batch.cu_num_draft[r + 1]].clip(0)
        if block is not None:
            drafts = np.full(len(drafts) + 1, block.token, np.int32)
        texts.append(np.append(batch.token_table[batch.table_rows[r], : batch.num_committed[r]], drafts))
    query_start_loc = offsets(end - todo.begin)
    masked = np.zeros(hidden.step.shape[1]) if block is None or block.hidden is None else block.hidden
    gathered = [
        _hidden_at(batch, todo, hidden, r, int(q) - 1).copy() if q < todo.end[r] else masked
        for r in range(num_requests)
        for q in positions[r]
    ]
    return MtpInputs(
        input_ids=_flat([texts[r][positions[r] - shift] for r in range(num_requests)], np.int32),
        positions=_flat(positions, np.int32),
        slot_mapping=_flat([_slot_mapping(batch, r, positions[r]) for r in range(num_requests)], np.int64),
        query_start_loc=query_start_loc,
        seq_lens=end.copy(),
        draft_rows=_flat([np.arange(q - n, q) for q, n in zip(query_start_loc[1:], drafting, strict=True)], np.int32),
        hidden=np.array(gathered, hidden.step.dtype).reshape(-1, hidden.step.shape[1]),
    )


def keep_hidden_(blocks: RequestBlocks[Array], maps: RowMaps, hidden: Array, kept: HiddenStateBuffer[Array]) -> None:
    """Keep a pass's newest hidden rows for passes of draft layers in later steps, in place.

    Of every request the last `num_kept`, and those that end a block. A position that is computed again, as its token
    was a rejected draft, replaces its row.
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


def mtp_postprocess_(
    batch: DraftBatch, step: int, logits: F32, hidden: Array, token_map: I32 | None = None
) -> NextInputs:
    """Write draft `step` of every drafting request, in place, and lay out the pass that continues after it.

    The draft is the most likely token, ties going to the lowest id; -1 where a logit is NaN or +inf or all are -inf,
    and then token 0 is run next. Draft i of a request stands at position num_committed + i and is the token of KV slot
    num_committed + i; requests that get no more drafts have no row. A draft that is less probable than
    `min_prob` is -1 too, where probabilities are wanted. A request gets no more drafts when the product of its drafts'
    probabilities is below its `min_survival`; that of -1 is 0.

    Args:
        logits: f32[A, V], a row for every request that wants more than `step` drafts.
        hidden: [A, H], the draft layer's output that the next pass reads.
        token_map: i32[V], the token of each column of the logits; None = its number.
    """
    drafting = np.flatnonzero(batch.num_wanted > step)
    is_valid = ~(np.isnan(logits) | (logits == np.inf)).any(axis=1) & (logits > -np.inf).any(axis=1)
    best = np.where(is_valid[:, None], logits, 0.0).argmax(axis=1)
    drafts = np.where(is_valid, best if token_map is None else token_map[best], -1).astype(np.int32)
    for row, r in enumerate(drafting):
        if batch.min_survival[r] >= 0:
            first = batch.cu_num_draft[r]
            probability = np.float32(_probability_of_best(logits[row]) if is_valid[row] else 0.0)
            if probability < np.float32(batch.min_prob):
                drafts[row], probability = -1, np.float32(0)
            batch.draft_prob[first + step] = probability
            if batch.draft_prob[first : first + step + 1].prod(dtype=np.float32) < batch.min_survival[r]:
                batch.num_wanted[r] = step + 1
    batch.draft_token_ids[batch.cu_num_draft[drafting] + step] = drafts
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
