"""Meaning of prepare_batch, settle_step_, group_slots, append_tokens, target_step and gather_output_rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.types import I32, I64, MAX_TREE_ROWS, DraftTokens, offsets


class Tables(NamedTuple):
    """What the request table keeps of every request.

    Attributes:
        tokens: i32[S, max_tokens_per_row].
        num_tokens: i32[S], how many of a row are committed.
        blocks: i32[S, max_blocks], padded with -1.
    """

    tokens: I32
    num_tokens: I32
    blocks: I32


class BatchMaps(NamedTuple):
    """The virtual-padding maps.

    Attributes:
        input_ids, positions: i32[T], rows concatenated; 0-based absolute positions.
        slot_mapping: i64[T], block_id * block_size + offset.
        tree_mask: i64[T], of requests with at most 64 tokens; see `ops.attention.cascade_append_attention`.
        query_start_loc: i32[R+1], row r owns tokens [q[r], q[r+1]).
        seq_lens: i32[R], length including this step's tokens.
        logits_indices: i32[L], the rows of T that need logits.
        cu_num_logits: i32[R+1], num_draft[r] + 1 logits rows, 0 while the prompt is unfinished.
        batch_id_per_output: i32[L], request row of every logits row.
        output_positions: i32[L], absolute position of the token that a logits row is for.
        parent_rows: i32[L], the row of logits that each one follows, counted from its request's first; -1 of that.
    """

    input_ids: I32
    positions: I32
    slot_mapping: I64
    tree_mask: I64
    query_start_loc: I32
    seq_lens: I32
    logits_indices: I32
    cu_num_logits: I32
    batch_id_per_output: I32
    output_positions: I32
    parent_rows: I32


def prepare_batch(
    tables: Tables, table_rows: I32, num_computed: I32, num_new: I32, draft: DraftTokens, block_size: int
) -> BatchMaps:
    """Lay the step's tokens out one request after another and say where each belongs.

    Token i of row r is number n = num_computed[r] + i: token n of the request's table row or, past those, one of its
    drafts. Its KV goes to the row's block n // block_size, offset n % block_size. Its position is n too, but a draft's
    is that after its parent's. A row that reaches its last known token wants logits of its last drafts + 1 tokens.

    Args:
        table_rows: i32[R], the request's row of the tables.
        num_computed: i32[R], tokens whose KV is already in the cache.
        num_new: i32[R] >= 1, tokens to run now, drafts included.
        draft: a row with drafts must finish and run at least one committed token before them, and if they branch at
            most 64 tokens.
    """
    num_requests = len(num_computed)
    num_draft = np.diff(draft.cu_num_draft)
    seq_lens = num_computed + num_new
    query_start_loc = offsets(num_new)
    num_logits = np.where(seq_lens == tables.num_tokens[table_rows] + num_draft, num_draft + 1, 0)

    request = np.repeat(np.arange(num_requests), num_new)
    places = np.arange(len(request)) - query_start_loc[request] + num_computed[request]
    known = [
        np.concatenate([tables.tokens[table_row, : tables.num_tokens[table_row]], draft.row(r)])
        for r, table_row in enumerate(table_rows)
    ]
    input_ids = [known[r][n] for r, n in zip(request, places, strict=True)]
    blocks = tables.blocks[table_rows[request], places // block_size].astype(np.int64)
    positions, tree_mask = places.copy(), np.zeros(len(request), np.int64)
    for t, (r, n) in enumerate(zip(request, places, strict=True)):
        num_tokens, num_before = int(tables.num_tokens[table_rows[r]]), int(t - query_start_loc[r])
        path = draft.path(int(r), int(n) - num_tokens)
        if path:
            positions[t] = num_tokens - 1 + len(path)
            num_before = int(num_new[r] - num_draft[r])
        if num_new[r] <= MAX_TREE_ROWS:
            tree_mask[t] = (1 << num_before) - 1 | sum(1 << num_before + d for d in path[:-1])
    batch_id_per_output = np.repeat(np.arange(num_requests), num_logits)
    cu_num_logits = offsets(num_logits)
    # Row l is the k-th last token of its request, where the k-th last of the request's logits rows is l.
    from_end = cu_num_logits[batch_id_per_output + 1] - np.arange(len(batch_id_per_output))
    logits_indices = query_start_loc[batch_id_per_output + 1] - from_end
    parent_rows = draft.parent_rows(cu_num_logits)
    if parent_rows is None:
        parent_rows = np.arange(len(from_end), dtype=np.int32) - cu_num_logits[batch_id_per_output] - 1
    return BatchMaps(
        input_ids=np.array(input_ids, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=blocks * block_size + places % block_size,
        tree_mask=tree_mask,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens.astype(np.int32),
        logits_indices=logits_indices.astype(np.int32),
        cu_num_logits=cu_num_logits,
        batch_id_per_output=batch_id_per_output.astype(np.int32),
        output_positions=(positions[logits_indices] + 1).astype(np.int32),
        parent_rows=parent_rows,
    )


class SettleTables(NamedTuple):
    """What a device has of every request when a step begins: Tables, and i32[S, max_made] guesses of what follows."""

    tokens: I32
    num_tokens: I32
    blocks: I32
    made_drafts: I32


def settle_step_(
    tables: SettleTables, block_size: int, table_rows: I32, offsets: tuple[I32, I32, I32], **maps: Any
) -> None:
    """Move a step that was prepared before the tokens of the one before it were known to where it belongs, in place.

    The host counted the most tokens that there can be. A request that has fewer runs its newest token and its
    drafts as many positions earlier: num_computed is then what it says or all tokens but the newest, whichever is less.
    Ids of known tokens come from the table. A draft of -1 is the one that the device has made for that place.

    Args:
        table_rows: i32[R]. offsets: query_start_loc, cu_num_logits and cu_num_draft, i32[R+1]; a row may have no token.
        maps: i32 input_ids[T], positions[T], num_computed[R], seq_lens[R], output_positions[L] and draft_token_ids[D],
            and i64 slot_mapping[T]; see BatchMaps.
    """
    query_start_loc, cu_num_logits, cu_num_draft = offsets
    for r, table_row in enumerate(table_rows):
        begin, end = query_start_loc[r : r + 2]
        if begin == end:
            continue
        drafts = maps["draft_token_ids"][cu_num_draft[r] : cu_num_draft[r + 1]]
        drafts[:] = np.where(drafts < 0, tables.made_drafts[table_row, : len(drafts)], drafts)
        num_tokens = tables.num_tokens[table_row]
        shift = max(maps["num_computed"][r] - (num_tokens - 1), 0)
        maps["num_computed"][r] -= shift
        maps["seq_lens"][r] -= shift
        maps["positions"][begin:end] -= shift
        maps["output_positions"][cu_num_logits[r] : cu_num_logits[r + 1]] -= shift
        places = maps["num_computed"][r] + np.arange(end - begin)
        blocks = tables.blocks[table_row, places // block_size].astype(np.int64)
        maps["slot_mapping"][begin:end] = blocks * block_size + places % block_size
        known = np.concatenate([tables.tokens[table_row, :num_tokens], drafts])
        maps["input_ids"][begin:end] = known[places]


def group_slots(
    first_slots: I64, query_start_loc: I32, seq_lens: I32, blocks: RequestBlocks[I32], block_size: int
) -> I64:
    """Return i64[T], the slots of a step's tokens in another KV group, whose blocks these are; -1 in rows of none.

    `first_slots`: i64[T], those in the first group.
    """
    slots = np.full(len(first_slots), -1, np.int64)
    for r, table_row in enumerate(blocks.table_rows):
        begin, end = query_start_loc[r : r + 2]
        places = np.arange(seq_lens[r] - (end - begin), seq_lens[r])
        slots[begin:end] = blocks.block_tables[table_row, places // block_size].astype(np.int64) * block_size
        slots[begin:end] += places % block_size
    return np.where(first_slots < 0, -1, slots)


def row_requests(
    query_start_loc: I32, seq_lens: I32, blocks: RequestBlocks[I32], num_rows: int
) -> tuple[I32, I32, RequestBlocks[I32]]:
    """Make every row a request of its own, of the same length; see `ops.batch.row_requests`."""
    counts, num_own = np.diff(query_start_loc), int(query_start_loc[-1])
    more = np.zeros(num_rows - num_own, np.int32)
    table_rows, lens = (np.append(np.repeat(part, counts), more) for part in (blocks.table_rows, seq_lens))
    starts = np.minimum(np.arange(num_rows + 1, dtype=np.int32), query_start_loc[-1])
    return starts, lens, RequestBlocks(table_rows, blocks.block_tables)


class OutputTables(NamedTuple):
    """What the request table keeps of every request's output.

    Attributes:
        tokens, num_tokens: see Tables.
        max_total: i32[S], tokens after which a request ends.
        count_rows: i32[S], row of token_counts, -1 = not counted.
        token_counts: i32[num_count_rows, V]; see `types.SamplingArrays`.
    """

    tokens: I32
    num_tokens: I32
    max_total: I32
    count_rows: I32
    token_counts: I32


def append_tokens(
    tables: OutputTables, table_rows: I32, token_ids: I32, cu_num_output: I32, planned_drafts: I32
) -> tuple[I32, I32]:
    """Put every row's output after the committed tokens of its table row, and count it where a penalty wants it.

    Then say what may be drafted: as many as were planned, but so few that max_total leaves room for one token after
    them; none without output.

    Returns:
        Committed tokens i32[R] of each row then, and how many may be drafted i32[R].
    """
    tokens, num_tokens, max_total, count_rows, token_counts = tables
    max_draft_len = np.zeros_like(planned_drafts)
    for r, table_row in enumerate(table_rows):
        outputs = token_ids[cu_num_output[r] : cu_num_output[r + 1]]
        for token_id in outputs:
            tokens[table_row, num_tokens[table_row]] = token_id
            num_tokens[table_row] += 1
            if count_rows[table_row] >= 0:
                token_counts[count_rows[table_row], token_id] += 1
        if len(outputs):
            max_draft_len[r] = min(planned_drafts[r], max(0, max_total[table_row] - num_tokens[table_row] - 1))
    return num_tokens[table_rows], max_draft_len


def target_step(  # noqa: PLR0913, PLR0917 (columns)
    table_rows: I32,
    num_computed: I32,
    num_new: I32,
    cu_num_logits: I32,
    cu_num_output: I32,
    num_committed: I32,
    num_blocks: I32,
    block_size: int,
    max_tokens_per_row: int,
) -> tuple[I32, I32]:
    """Say what a step ran of each row, for those that draft from its hidden rows; see `proposer.TargetStep`.

    The hidden rows of rejected drafts are not certain. A row whose tokens were all run and that has no output
    nevertheless has failed, or runs its newest token again: the rows before that token are.

    Args:
        num_computed, num_new: i32[R], tokens in the KV cache before the step, and those that were run.
        cu_num_logits, cu_num_output: i32[R+1]; a row without logits has not finished its prompt.
        num_committed: i32[R], tokens with the step's output.

    Returns:
        num_valid and num_kv_slots, i32[R].
    """
    num_run = num_computed + num_new - np.diff(cu_num_logits)
    num_valid = np.where(np.diff(cu_num_output) > 0, num_committed - 1, num_run)
    return num_valid.astype(np.int32), np.minimum(num_blocks[table_rows] * block_size, max_tokens_per_row)


def gather_output_rows(x: Array, indices: I32) -> Array:
    """Return rows i32[L] of x [T, H]: the hidden rows that need logits."""
    return x[indices]
