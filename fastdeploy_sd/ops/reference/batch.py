"""Meaning of prepare_batch, append_tokens and gather_output_rows."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.native.arrays import Array
from fastdeploy_sd.ops.native.batch import BatchMaps, BatchRows, OutputRows, TokenTables
from fastdeploy_sd.types import I32


def _offsets(counts: I32) -> I32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def prepare_batch(rows: BatchRows, token_table: I32, block_size: int) -> BatchMaps:
    """Lay the step's tokens out one request after another and say where each belongs.

    Token i of row r sits at position p = num_computed[r] + i; it is the committed token p of the request's slot or,
    past those, one of its drafts. Its KV goes to block_tables[r, p // block_size], offset p % block_size. A row that
    reaches its last known token wants logits of its last drafts + 1 tokens.

    Args:
        token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.
    """
    num_requests = len(rows.num_computed)
    num_draft = np.diff(rows.draft.cu_num_draft)
    seq_lens = rows.num_computed + rows.num_new
    query_start_loc = _offsets(rows.num_new)
    num_logits = np.where(seq_lens == rows.num_known, num_draft + 1, 0)

    request = np.repeat(np.arange(num_requests), rows.num_new)
    positions = np.arange(len(request)) - query_start_loc[request] + rows.num_computed[request]
    known = [
        np.concatenate([token_table[rows.slots[r], : rows.num_known[r] - num_draft[r]], rows.draft.row(r)])
        for r in range(num_requests)
    ]
    input_ids = [known[r][p] for r, p in zip(request, positions, strict=True)]
    blocks = rows.block_tables[request, positions // block_size].astype(np.int64)
    batch_id_per_output = np.repeat(np.arange(num_requests), num_logits)
    cu_num_logits = _offsets(num_logits)
    # Row l is the k-th last token of its request, where the k-th last of the request's logits rows is l.
    from_end = cu_num_logits[batch_id_per_output + 1] - np.arange(len(batch_id_per_output))
    return BatchMaps(
        input_ids=np.array(input_ids, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=blocks * block_size + positions % block_size,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens.astype(np.int32),
        logits_indices=(query_start_loc[batch_id_per_output + 1] - from_end).astype(np.int32),
        cu_num_logits=cu_num_logits,
        batch_id_per_output=batch_id_per_output.astype(np.int32),
        output_positions=(seq_lens[batch_id_per_output] - from_end + 1).astype(np.int32),
    )


def append_tokens(output: OutputRows, tables: TokenTables) -> TokenTables:
    """Put every row's output behind the committed tokens of its slot, and count it where a penalty wants that.

    Returns:
        The tables as they are then, copies.
    """
    tokens, num_tokens, counts = (table.copy() for table in tables)
    for r, slot in enumerate(output.slots):
        for token_id in output.token_ids[output.cu_num_output[r] : output.cu_num_output[r + 1]]:
            tokens[slot, num_tokens[slot]] = token_id
            num_tokens[slot] += 1
            if output.count_rows[r] >= 0:
                counts[output.count_rows[r], token_id] += 1
    return TokenTables(tokens, num_tokens, counts)


def gather_output_rows(x: Array, indices: I32) -> Array:
    """Return x[indices]: the hidden rows that need logits.

    Args:
        x: [T, H] of any type.
        indices: i32[L].
    """
    return x[indices]
