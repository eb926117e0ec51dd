"""What runs before and after a draft layer: mtp_preprocess, mtp_postprocess_ and keep_hidden_.

And before and after the passes of a step: MTP_PLAN, MTP_COLLECT and MTP_HOLD, bound to the memory of the steps.

Hidden rows and logits stay where they are; per-request columns and the two tables are arrays of the host, or tensors.
"""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, I32, I64, Attr, In, InOut, Out, Value
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.program.op import Op
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.ops.mtp_batch import (
    DraftBatch,
    HiddenRows,
    HiddenStateBuffer,
    MtpInputs,
    MtpPass,
    NextInputs,
    RowMaps,
)

# See `reference.mtp.mtp_plan`.
MTP_PLAN = HostOp(
    "mtp_plan",
    table_rows=In(I32, "num_requests"),
    num_committed=In(I32, "num_requests"),
    max_draft_len=In(I32, "num_requests"),
    num_computed=In(I32, "num_requests"),
    num_valid=In(I32, "num_requests"),
    num_kv_slots=In(I32, "num_requests"),
    next_slot=In(I32, "num_table_rows"),
    num_begun=In(I32, "num_table_rows"),
    num_steps=Attr(int),
    max_position=Attr(int),
    block_size=Attr(int),
    begin=Out(I32, "num_requests"),
    ends=Out(I32, "num_layers, max_requests"),
    cu_num_draft=Out(I32, "num_requests + 1"),
    num_wanted=Out(I32, "num_requests"),
    draft_start_loc=Out(I32, "num_requests + 1"),
    draft_token_ids=Out(I32, "num_drafts"),
    num_filling=Out(I32, "1"),
    num_tokens=Out(I32, "num_layers"),
    num_drafting=Out(I32, "num_counts"),
)
# See `reference.mtp.mtp_collect_`.
MTP_COLLECT = HostOp(
    "mtp_collect",
    table_rows=In(I32, "num_requests"),
    begin=In(I32, "num_requests"),
    end=In(I32, "num_requests"),
    next_slot=InOut(I32, "num_table_rows"),
    cu_num_draft=InOut(I32, "num_requests + 1"),
    draft_token_ids=InOut(I32, "num_drafts"),
    draft_prob=InOut(F32, "num_drafts"),
    kept=Out(I32, "num_drafts"),
)
# See `reference.mtp.mtp_hold_`.
MTP_HOLD = HostOp(
    "mtp_hold",
    table_rows=In(I32, "num_requests"),
    begin=In(I32, "num_requests"),
    end=In(I32, "num_requests"),
    cu_num_draft=In(I32, "num_requests + 1"),
    draft_token_ids=In(I32, "num_drafts"),
    next_slot=InOut(I32, "num_table_rows"),
    made_drafts=InOut(I32, "num_table_rows, max_made"),
)
MTP_PREPROCESS = Op(
    "mtp_preprocess",
    "num_requests",
    table_rows=In(I32, "num_requests"),
    begin=In(I32, "num_requests"),
    end=In(I32, "num_requests"),
    hidden_begin=In(I32, "num_requests"),
    cu_hidden=In(I32, "num_requests + 1"),
    num_committed=In(I32, "num_requests"),
    cu_num_draft=In(I32, "num_requests + 1"),
    draft_token_ids=In(I32, "num_drafts"),
    token_table=In(I32, "num_table_rows, max_tokens_per_row"),
    block_table=In(I32, "num_table_rows, max_blocks"),
    rows_hidden=In(ACTIVATIONS, "num_hidden, width"),
    block_hidden=In("rows_hidden", "num_blocks, width"),
    request_hidden=In("rows_hidden", "num_table_rows*num_kept, width"),
    block_size=Attr(int),
    num_kept=Attr(int),
    source=Attr(int),
    num_tokens=Attr(int),
    num_draft_rows=Attr(int),
    row_bytes=Value("width*itemsize(rows_hidden)"),
    input_ids=Out(I32, "num_tokens"),
    positions=Out(I32, "num_tokens"),
    slot_mapping=Out(I64, "num_tokens"),
    query_start_loc=Out(I32, "num_requests + 1"),
    seq_lens=Out(I32, "num_requests"),
    draft_rows=Out(I32, "num_draft_rows"),
    out_hidden=Out("rows_hidden", "num_tokens, width"),
)
KEEP_HIDDEN = Op(
    "keep_hidden",
    None,
    table_rows=In(I32, "num_requests"),
    query_start_loc=In(I32, "num_requests + 1"),
    seq_lens=In(I32, "num_requests"),
    block_table=In(I32, "num_table_rows, max_blocks"),
    hidden=In(ACTIVATIONS, "num_tokens, width"),
    block_hidden=InOut("hidden", "num_blocks, width"),
    request_hidden=InOut("hidden", "num_table_rows*num_kept, width"),
    block_size=Attr(int),
    num_kept=Attr(int),
    row_bytes=Value("width*itemsize(hidden)"),
)
MTP_POSTPROCESS = Op(
    "mtp_postprocess",
    "num_requests",
    table_rows=In(I32, "num_requests"),
    num_committed=In(I32, "num_requests"),
    cu_num_draft=In(I32, "num_requests + 1"),
    block_table=In(I32, "num_table_rows, max_blocks"),
    min_survival=In(F32, "num_requests"),
    logits=In(F32, "num_rows, vocab_size"),
    hidden=In(ACTIVATIONS, "num_rows, width"),
    draft_token_ids=InOut(I32, "num_drafts"),
    num_wanted=InOut(I32, "num_requests"),
    draft_prob=InOut(F32, "num_drafts"),
    block_size=Attr(int),
    step=Attr(int),
    min_prob=Attr(float),
    num_next=Attr(int),
    row_bytes=Value("width*itemsize(hidden)"),
    input_ids=Out(I32, "num_next"),
    positions=Out(I32, "num_next"),
    slot_mapping=Out(I64, "num_next"),
    query_start_loc=Out(I32, "num_requests + 1"),
    seq_lens=Out(I32, "num_requests"),
    out_hidden=Out("hidden", "num_next, width"),
    num_continued=Out(I32, "1"),
)


def mtp_preprocess(batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Any]) -> MtpInputs:
    """Lay out one pass of a draft layer.

    The meaning is `reference.mtp.mtp_preprocess`.

    Raises:
        ValueError: a shape or dtype disagrees, or counts, positions, blocks and offsets contradict each other; nothing
            is written then.
    """
    kept = hidden.kept
    return MtpInputs(
        *MTP_PREPROCESS(
            table_rows=batch.table_rows,
            begin=todo.begin,
            end=todo.end,
            hidden_begin=todo.hidden_begin,
            cu_hidden=todo.cu_hidden,
            num_committed=batch.num_committed,
            cu_num_draft=batch.cu_num_draft,
            draft_token_ids=batch.draft_token_ids,
            token_table=batch.token_table,
            block_table=batch.block_table,
            rows_hidden=hidden.step,
            block_hidden=kept.blocks,
            request_hidden=kept.requests,
            block_size=batch.block_size,
            num_kept=kept.num_kept,
            source=todo.source,
            num_tokens=todo.num_tokens,
            num_draft_rows=batch.num_drafting[todo.source],
        )
    )


def keep_hidden_(blocks: RequestBlocks[Any], maps: RowMaps, hidden: Any, kept: HiddenStateBuffer[Any]) -> None:
    """Keep a pass's newest hidden rows for passes of draft layers in later steps, in place.

    The meaning is `reference.mtp.keep_hidden_`.

    Args:
        hidden: [T, H].

    Raises:
        ValueError: a shape or dtype disagrees, or lengths, blocks and offsets contradict each other; nothing is written
            then.
    """
    KEEP_HIDDEN(
        table_rows=blocks.table_rows,
        query_start_loc=maps.query_start_loc,
        seq_lens=maps.seq_lens,
        block_table=blocks.block_tables,
        hidden=hidden,
        block_hidden=kept.blocks,
        request_hidden=kept.requests,
        block_size=kept.block_size,
        num_kept=kept.num_kept,
    )


def mtp_postprocess_(batch: DraftBatch, step: int, logits: Any, hidden: Any) -> NextInputs:
    """Write draft `step` of every drafting request, in place, and lay out the pass that continues after it.

    The meaning is `reference.mtp.mtp_postprocess_`.

    Args:
        step: from 0.
        logits: f32[A, V], a row for every request that wants more than `step` drafts.
        hidden: [A, H], the draft layer's output that the next pass reads.

    Returns:
        Room for batch.num_drafting[step + 1] rows; the first num_continued are written.

    Raises:
        ValueError: a shape or dtype disagrees, a request wants more drafts than it has room for, or it has no block for
            its next slot.
    """
    return NextInputs(
        *MTP_POSTPROCESS(
            table_rows=batch.table_rows,
            num_committed=batch.num_committed,
            cu_num_draft=batch.cu_num_draft,
            block_table=batch.block_table,
            min_survival=batch.min_survival,
            logits=logits,
            hidden=hidden,
            draft_token_ids=batch.draft_token_ids,
            num_wanted=batch.num_wanted,
            draft_prob=batch.draft_prob,
            block_size=batch.block_size,
            step=step,
            min_prob=batch.min_prob,
            num_next=batch.num_drafting[step + 1],
        )
    )
