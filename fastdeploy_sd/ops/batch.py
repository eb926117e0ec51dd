"""The ops around a step's batch: its maps, the rows that need logits, and the output after the committed tokens.

The meaning of each op is the function of its name in `reference.batch`.
"""

from __future__ import annotations

from typing import Any, cast

from fastdeploy_sd.device.program.declaration import ANY, I32, I64, Attr, In, InOut, Out, Value, each
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.program.op import A, Op
from fastdeploy_sd.ops.kv_cache import RequestBlocks

_TOKENS, _BLOCKS = In(I32, "num_table_rows, max_tokens_per_row"), In(I32, "num_table_rows, max_blocks")
_REQUESTS, _OFFSETS, _TABLE_ROWS = In(I32, "num_requests"), In(I32, "num_requests + 1"), In(I32, "num_table_rows")

GATHER_OUTPUT_ROWS = Op(
    "gather_output_rows",
    "num_rows_out",
    x=In(ANY, "num_rows_in, width"),
    indices=In(I32, "num_rows_out"),
    row_bytes=Value("width*itemsize(x)"),
    y=Out("x", "num_rows_out, width"),
)
PREPARE_BATCH = HostOp(
    "prepare_batch",
    table_rows=_REQUESTS,
    token_table=_TOKENS,
    num_tokens=_TABLE_ROWS,
    block_tables=_BLOCKS,
    **each(_REQUESTS, "num_computed", "num_new"),
    draft_token_ids=In(I32, "num_drafts"),
    cu_num_draft=_OFFSETS,
    draft_parents=In(I32, "num_drafts", optional=True),
    block_size=Attr(int),
    **each(Out(I32, "max_num_tokens"), "input_ids", "positions"),
    **each(Out(I64, "max_num_tokens"), "slot_mapping", "tree_mask"),
    query_start_loc=Out(I32, "num_requests + 1"),
    seq_lens=Out(I32, "num_requests"),
    logits_indices=Out(I32, "max_num_logits"),
    cu_num_logits=Out(I32, "num_requests + 1"),
    **each(Out(I32, "max_num_logits"), "batch_id_per_output", "output_positions", "parent_rows"),
)
SETTLE_STEP = Op(
    "settle_step",
    None,
    table_rows=_REQUESTS,
    token_table=_TOKENS,
    num_tokens=_TABLE_ROWS,
    block_tables=_BLOCKS,
    made_drafts=In(I32, "num_table_rows, max_made"),
    **each(_OFFSETS, "query_start_loc", "cu_num_logits", "cu_num_draft"),
    block_size=Attr(int),
    **each(InOut(I32, "num_ids"), "input_ids", "positions"),
    slot_mapping=InOut(I64, "num_ids"),
    **each(InOut(I32, "num_requests"), "num_computed", "seq_lens"),
    output_positions=InOut(I32, "num_logits"),
    draft_token_ids=InOut(I32, "num_drafts"),
)
GROUP_SLOTS = Op(
    "group_slots",
    None,
    table_rows=_REQUESTS,
    query_start_loc=_OFFSETS,
    seq_lens=_REQUESTS,
    first_slots=In(I64, "num_tokens"),
    block_tables=_BLOCKS,
    block_size=Attr(int),
    slot_mapping=Out(I64, "num_tokens"),
)
ROW_REQUESTS = Op(
    "row_requests",
    None,
    table_rows=_REQUESTS,
    query_start_loc=_OFFSETS,
    seq_lens=_REQUESTS,
    num_rows=Attr(int),
    row_table_rows=Out(I32, "num_rows"),
    row_starts=Out(I32, "num_rows + 1"),
    row_lens=Out(I32, "num_rows"),
)
APPEND_TOKENS = HostOp(
    "append_tokens",
    table_rows=_REQUESTS,
    token_ids=In(I32, "num_outputs"),
    cu_num_output=_OFFSETS,
    planned_drafts=_REQUESTS,
    tokens=InOut(I32, "num_table_rows, max_tokens_per_row"),
    num_tokens=InOut(I32, "num_table_rows"),
    **each(_TABLE_ROWS, "max_total", "count_rows"),
    token_counts=InOut(I32, "num_count_rows, vocab_size"),
    **each(Out(I32, "num_requests"), "num_committed", "max_draft_len"),
)
TARGET_STEP = HostOp(
    "target_step",
    **each(_REQUESTS, "table_rows", "num_computed", "num_new"),
    **each(_OFFSETS, "cu_num_logits", "cu_num_output"),
    num_committed=_REQUESTS,
    num_blocks=_TABLE_ROWS,
    **each(Attr(int), "block_size", "max_tokens_per_row"),
    **each(Out(I32, "num_requests"), "num_valid", "num_kv_slots"),
)


def settle_step_(tables: Any, block_size: int, table_rows: A, offsets: tuple[A, A, A], **maps: A) -> None:
    """Move a step that was prepared before the tokens of the one before it were known to where it belongs, in place.

    Args:
        tables: see `reference.batch.SettleTables`.
        offsets: query_start_loc, cu_num_logits and cu_num_draft, i32[R+1] each.
        maps: input_ids, positions, slot_mapping, num_computed, seq_lens, output_positions and draft_token_ids.
    """
    SETTLE_STEP(
        table_rows=table_rows,
        token_table=tables.tokens,
        num_tokens=tables.num_tokens,
        block_tables=tables.blocks,
        made_drafts=tables.made_drafts,
        **dict(zip(("query_start_loc", "cu_num_logits", "cu_num_draft"), offsets, strict=True)),
        block_size=block_size,
        **maps,
    )


def group_slots(first_slots: A, query_start_loc: A, seq_lens: A, blocks: RequestBlocks[A], block_size: int) -> A:
    """Return i64[T], the slots of a step's tokens in another KV group, whose blocks these are; -1 in rows of none.

    `first_slots`: i64[T], those in the first group.
    """
    maps = {"first_slots": first_slots, "query_start_loc": query_start_loc, "seq_lens": seq_lens}
    return cast("A", GROUP_SLOTS(**maps, **blocks._asdict(), block_size=block_size))


def row_requests(
    query_start_loc: A, seq_lens: A, blocks: RequestBlocks[A], num_rows: Any
) -> tuple[A, A, RequestBlocks[A]]:
    """Make every row a request of its own, of the same length: in attention a request's rows then see each other.

    Returns:
        Offsets i32[T+1], lengths i32[T] and blocks of T = num_rows requests; those after the requests' own have no row.
    """
    rows = ROW_REQUESTS(
        table_rows=blocks.table_rows, query_start_loc=query_start_loc, seq_lens=seq_lens, num_rows=num_rows
    )
    table_rows, starts, lens = cast("tuple[A, A, A]", rows)
    return starts, lens, RequestBlocks(table_rows, blocks.block_tables)


def gather_output_rows(x: A, indices: Any) -> A:
    """Return rows i32[L] of x [T, H], which need logits; indices may be a NumPy array where x is a tensor."""
    return cast("A", GATHER_OUTPUT_ROWS(x=x, indices=indices))
