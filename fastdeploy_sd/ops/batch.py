"""The ops around a step's batch: its maps, the rows that need logits, and the output after the committed tokens."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.program.declaration import ANY, I32, I64, Attr, In, InOut, Out, Value
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.program.op import A, Op

GATHER_OUTPUT_ROWS = Op(
    "gather_output_rows",
    "num_rows_out",
    x=In(ANY, "num_rows_in, width"),
    indices=In(I32, "num_rows_out"),
    row_bytes=Value("width*itemsize(x)"),
    y=Out("x", "num_rows_out, width"),
)


# See `reference.batch.prepare_batch`.
PREPARE_BATCH = HostOp(
    "prepare_batch",
    table_rows=In(I32, "num_requests"),
    token_table=In(I32, "num_table_rows, max_tokens_per_row"),
    num_tokens=In(I32, "num_table_rows"),
    block_tables=In(I32, "num_table_rows, max_blocks"),
    num_computed=In(I32, "num_requests"),
    num_new=In(I32, "num_requests"),
    draft_token_ids=In(I32, "num_drafts"),
    cu_num_draft=In(I32, "num_requests + 1"),
    block_size=Attr(int),
    input_ids=Out(I32, "max_num_tokens"),
    positions=Out(I32, "max_num_tokens"),
    slot_mapping=Out(I64, "max_num_tokens"),
    query_start_loc=Out(I32, "num_requests + 1"),
    seq_lens=Out(I32, "num_requests"),
    logits_indices=Out(I32, "max_num_logits"),
    cu_num_logits=Out(I32, "num_requests + 1"),
    batch_id_per_output=Out(I32, "max_num_logits"),
    output_positions=Out(I32, "max_num_logits"),
)

# See `reference.batch.settle_step_`.
SETTLE_STEP = Op(
    "settle_step",
    None,
    table_rows=In(I32, "num_requests"),
    token_table=In(I32, "num_table_rows, max_tokens_per_row"),
    num_tokens=In(I32, "num_table_rows"),
    block_tables=In(I32, "num_table_rows, max_blocks"),
    made_drafts=In(I32, "num_table_rows, max_made"),
    query_start_loc=In(I32, "num_requests + 1"),
    cu_num_logits=In(I32, "num_requests + 1"),
    cu_num_draft=In(I32, "num_requests + 1"),
    block_size=Attr(int),
    input_ids=InOut(I32, "num_ids"),
    positions=InOut(I32, "num_ids"),
    slot_mapping=InOut(I64, "num_ids"),
    num_computed=InOut(I32, "num_requests"),
    seq_lens=InOut(I32, "num_requests"),
    output_positions=InOut(I32, "num_logits"),
    draft_token_ids=InOut(I32, "num_drafts"),
)

# See `reference.batch.append_tokens`.
APPEND_TOKENS = HostOp(
    "append_tokens",
    table_rows=In(I32, "num_requests"),
    token_ids=In(I32, "num_outputs"),
    cu_num_output=In(I32, "num_requests + 1"),
    planned_drafts=In(I32, "num_requests"),
    tokens=InOut(I32, "num_table_rows, max_tokens_per_row"),
    num_tokens=InOut(I32, "num_table_rows"),
    max_total=In(I32, "num_table_rows"),
    count_rows=In(I32, "num_table_rows"),
    token_counts=InOut(I32, "num_count_rows, vocab_size"),
    num_committed=Out(I32, "num_requests"),
    max_draft_len=Out(I32, "num_requests"),
)

# See `reference.batch.target_step`.
TARGET_STEP = HostOp(
    "target_step",
    table_rows=In(I32, "num_requests"),
    num_computed=In(I32, "num_requests"),
    num_new=In(I32, "num_requests"),
    cu_num_logits=In(I32, "num_requests + 1"),
    cu_num_output=In(I32, "num_requests + 1"),
    num_committed=In(I32, "num_requests"),
    num_blocks=In(I32, "num_table_rows"),
    block_size=Attr(int),
    max_tokens_per_row=Attr(int),
    num_valid=Out(I32, "num_requests"),
    num_kv_slots=Out(I32, "num_requests"),
)


def settle_step_(tables: Any, block_size: int, table_rows: A, offsets: tuple[A, A, A], **maps: A) -> None:
    """Move a step that was prepared before the tokens of the one before it were known to where it belongs, in place.

    The meaning is `reference.batch.settle_step_`.

    Args:
        tables: see `reference.batch.SettleTables`.
        offsets: query_start_loc, cu_num_logits and cu_num_draft, i32[R+1] each.
        maps: input_ids, positions, slot_mapping, num_computed, seq_lens, output_positions and draft_token_ids.

    Raises:
        ValueError: a shape or dtype disagrees, offsets fall, or counts, blocks and tables contradict each other.
    """
    query_start_loc, cu_num_logits, cu_num_draft = offsets
    SETTLE_STEP(
        table_rows=table_rows,
        token_table=tables.tokens,
        num_tokens=tables.num_tokens,
        block_tables=tables.blocks,
        made_drafts=tables.made_drafts,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        cu_num_draft=cu_num_draft,
        block_size=block_size,
        **maps,
    )


def gather_output_rows(x: A, indices: Any) -> A:
    """Return the rows of x that need logits.

    Args:
        x: [T, H], any dtype.
        indices: i32[L], rows of x; may be a NumPy array where x is a tensor.

    Returns:
        [L, H] in x's dtype.

    Raises:
        ValueError: a shape or dtype disagrees, or an index is outside x.
    """
    y: A = GATHER_OUTPUT_ROWS(x=x, indices=indices)
    return y
