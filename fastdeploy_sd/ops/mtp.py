"""What runs before and after a draft layer, and before and after the passes of a step.

The meaning of each op is the function of its name in `reference.mtp`; what contradicts itself is refused before
anything is written. Hidden rows stay where they are; columns and tables are arrays of the host, or tensors.
"""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, I64, Attr, In, InOut, Out, Value, each
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.program.op import Op
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

_REQUESTS, _REQUESTS_PLUS_1, _TABLE_ROWS = "num_requests", "num_requests + 1", "num_table_rows"
_BLOCKS = In(I32, "num_table_rows, max_blocks")
_NO_BLOCK = -1

MTP_PLAN = HostOp(
    "mtp_plan",
    **each(In(I32, _REQUESTS), "table_rows", "num_committed", "max_draft_len", "num_computed", "num_valid"),
    num_kv_slots=In(I32, _REQUESTS),
    **each(In(I32, _TABLE_ROWS), "next_slot", "num_begun"),
    **each(Attr(int), "num_steps", "max_position", "block_size", "max_filled"),
    **each(Attr(int), "num_newest", "num_more", "reads_hidden"),
    begin=Out(I32, _REQUESTS),
    ends=Out(I32, "num_layers, max_requests"),
    cu_num_draft=Out(I32, _REQUESTS_PLUS_1),
    num_wanted=Out(I32, _REQUESTS),
    draft_start_loc=Out(I32, _REQUESTS_PLUS_1),
    draft_token_ids=Out(I32, "num_drafts"),
    num_filling=Out(I32, "1"),
    num_tokens=Out(I32, "num_layers"),
    num_drafting=Out(I32, "num_counts"),
)
MTP_COLLECT = HostOp(
    "mtp_collect",
    **each(In(I32, _REQUESTS), "table_rows", "begin", "end"),
    next_slot=InOut(I32, _TABLE_ROWS),
    cu_num_draft=InOut(I32, _REQUESTS_PLUS_1),
    draft_token_ids=InOut(I32, "num_drafts"),
    draft_prob=InOut(F32, "num_drafts"),
    kept=Out(I32, "num_drafts"),
)
MTP_HOLD = HostOp(
    "mtp_hold",
    **each(In(I32, _REQUESTS), "table_rows", "begin", "end"),
    cu_num_draft=In(I32, _REQUESTS_PLUS_1),
    draft_token_ids=In(I32, "num_drafts"),
    next_slot=InOut(I32, _TABLE_ROWS),
    made_drafts=InOut(I32, "num_table_rows, max_made"),
)
MTP_PREPROCESS = Op(
    "mtp_preprocess",
    _REQUESTS,
    **each(In(I32, _REQUESTS), "table_rows", "begin", "end", "hidden_begin"),
    cu_hidden=In(I32, _REQUESTS_PLUS_1),
    num_committed=In(I32, _REQUESTS),
    cu_num_draft=In(I32, _REQUESTS_PLUS_1),
    draft_token_ids=In(I32, "num_drafts"),
    token_table=In(I32, "num_table_rows, max_tokens_per_row"),
    block_table=_BLOCKS,
    rows_hidden=In(ACTIVATIONS, "num_hidden, width"),
    block_hidden=In("rows_hidden", "num_blocks, width"),
    request_hidden=In("rows_hidden", "num_table_rows*num_kept, width"),
    mask_hidden=In("rows_hidden", "width", optional=True),
    **each(Attr(int), "block_size", "num_kept", "source", "num_tokens", "num_draft_rows"),
    **each(Attr(int), "mask_token", "more_rows", "token_shift"),
    row_bytes=Value("width*itemsize(rows_hidden)"),
    **each(Out(I32, "num_tokens"), "input_ids", "positions"),
    slot_mapping=Out(I64, "num_tokens"),
    query_start_loc=Out(I32, _REQUESTS_PLUS_1),
    seq_lens=Out(I32, _REQUESTS),
    draft_rows=Out(I32, "num_draft_rows"),
    out_hidden=Out("rows_hidden", "num_tokens, width"),
)
KEEP_HIDDEN = Op(
    "keep_hidden",
    None,
    table_rows=In(I32, _REQUESTS),
    query_start_loc=In(I32, _REQUESTS_PLUS_1),
    seq_lens=In(I32, _REQUESTS),
    block_table=_BLOCKS,
    hidden=In(ACTIVATIONS, "num_tokens, width"),
    block_hidden=InOut("hidden", "num_blocks, width"),
    request_hidden=InOut("hidden", "num_table_rows*num_kept, width"),
    **each(Attr(int), "block_size", "num_kept"),
    row_bytes=Value("width*itemsize(hidden)"),
)
MTP_POSTPROCESS = Op(
    "mtp_postprocess",
    _REQUESTS,
    **each(In(I32, _REQUESTS), "table_rows", "num_committed"),
    cu_num_draft=In(I32, _REQUESTS_PLUS_1),
    block_table=_BLOCKS,
    min_survival=In(F32, _REQUESTS),
    logits=In(F32, "num_rows, vocab_size"),
    hidden=In(ACTIVATIONS, "num_rows, width"),
    draft_token_ids=InOut(I32, "num_drafts"),
    num_wanted=InOut(I32, _REQUESTS),
    draft_prob=InOut(F32, "num_drafts"),
    token_map=In(I32, "vocab_size", optional=True),
    **each(Attr(int), "block_size", "step"),
    min_prob=Attr(float),
    num_next=Attr(int),
    row_bytes=Value("width*itemsize(hidden)"),
    **each(Out(I32, "num_next"), "input_ids", "positions"),
    slot_mapping=Out(I64, "num_next"),
    query_start_loc=Out(I32, _REQUESTS_PLUS_1),
    seq_lens=Out(I32, _REQUESTS),
    out_hidden=Out("hidden", "num_next, width"),
    num_continued=Out(I32, "1"),
)


def mtp_preprocess(
    batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Any], block: MaskedRows[Any] | None = None
) -> MtpInputs:
    """Lay out one pass of a draft layer; with `block` one that makes all drafts."""
    kept = hidden.kept
    found = MTP_PREPROCESS(
        **MTP_PREPROCESS.arguments_in(batch),
        **MTP_PREPROCESS.arguments_in(todo),
        rows_hidden=hidden.step,
        block_hidden=kept.blocks,
        request_hidden=kept.requests,
        num_kept=kept.num_kept,
        num_draft_rows=batch.num_drafting[todo.source] if block is None else block.num_drafts,
        mask_hidden=None if block is None else block.hidden,
        mask_token=_NO_BLOCK if block is None else block.token,
        more_rows=0 if block is None else block.more_rows,
        token_shift=0 if block is None else block.token_shift,
    )
    return MtpInputs(*found)


def keep_hidden_(blocks: RequestBlocks[Any], maps: RowMaps, hidden: Any, kept: HiddenStateBuffer[Any]) -> None:
    """Keep a pass's newest hidden rows [T, H] for passes of draft layers in later steps, in place."""
    KEEP_HIDDEN(
        **KEEP_HIDDEN.arguments_in(kept),
        table_rows=blocks.table_rows,
        query_start_loc=maps.query_start_loc,
        seq_lens=maps.seq_lens,
        block_table=blocks.block_tables,
        hidden=hidden,
        block_hidden=kept.blocks,
        request_hidden=kept.requests,
    )


def mtp_postprocess_(
    batch: DraftBatch, step: int, logits: Any, hidden: Any, token_map: Any | None = None
) -> NextInputs:
    """Write draft `step` of every drafting request, in place, and lay out the pass that continues after it.

    `token_map`: i32[V], the token of each column of the logits; None = its number.

    Returns:
        Room for batch.num_drafting[step + 1] rows; the first num_continued are written.
    """
    arguments = MTP_POSTPROCESS.arguments_in(batch)
    num_next = batch.num_drafting[step + 1]
    rows = {"logits": logits, "hidden": hidden, "token_map": token_map}
    return NextInputs(*MTP_POSTPROCESS(**arguments, **rows, step=step, num_next=num_next))
