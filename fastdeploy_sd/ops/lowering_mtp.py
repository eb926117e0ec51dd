"""What recorded calls of mtp_preprocess_ and mtp_postprocess_ become; see ops/lowering.py."""

from __future__ import annotations

from typing import Any

import paddle

from fastdeploy_sd.ops.native.mtp import MtpPostprocessParams, MtpPreprocessParams
from fastdeploy_sd.ops.recorder import ELEMENT_BYTES, CallBuilder, Dim, Outputs


def _table(call: CallBuilder, name: str, table: Any) -> tuple[Dim, Dim]:
    """Rows and columns of a table of the host, which may both be sizes."""
    if len(table.shape) != 2:  # noqa: PLR2004
        raise call.error(name, "two dimensions", list(table.shape))
    return table.shape[0], table.shape[1]


def mtp_preprocess(call: CallBuilder, *args: Any) -> Outputs:
    """Lower mtp_preprocess_."""
    *columns, token_table, block_table, hidden, block_hidden, request_hidden = args[:14]
    slots, begin, end, hidden_begin, hidden_end, cu_hidden, num_committed, cu_num_draft, draft_token_ids = columns
    block_size, source, num_tokens, num_draft_rows = args[14:]
    (requests,), dtype = slots.shape, hidden.dtype
    num_hidden, width = call.matrix("hidden", hidden)
    num_blocks, _ = call.matrix("block_hidden", block_hidden)
    num_slots, max_tokens_per_row = _table(call, "token_table", token_table)
    max_blocks = _table(call, "block_table", block_table)[1]
    num_kept, _ = call.matrix("request_hidden", request_hidden)
    out = {
        "input_ids": call.output(paddle.int32, (num_tokens,)),
        "positions": call.output(paddle.int32, (num_tokens,)),
        "slot_mapping": call.output(paddle.int64, (num_tokens,)),
        "query_start_loc": call.output(paddle.int32, (requests + 1,)),
        "seq_lens": call.output(paddle.int32, (requests,)),
        "draft_rows": call.output(paddle.int32, (num_draft_rows,)),
        "hidden": call.output(dtype, (num_tokens, width)),
    }

    def column(name: str, tensor: Any, size: Dim = requests) -> Any:
        return call.data(name, tensor, paddle.int32, (size,))

    call.emit(
        "mtp_preprocess",
        MtpPreprocessParams,
        num_requests=requests,
        num_tokens=num_tokens,
        num_draft_rows=num_draft_rows,
        num_hidden=num_hidden,
        num_slots=num_slots,
        max_tokens_per_row=max_tokens_per_row,
        max_blocks=max_blocks,
        num_blocks=num_blocks,
        block_size=block_size,
        source=source,
        row_bytes=width * ELEMENT_BYTES[dtype],
        slots=column("slots", slots),
        begin=column("begin", begin),
        end=column("end", end),
        hidden_begin=column("hidden_begin", hidden_begin),
        hidden_end=column("hidden_end", hidden_end),
        cu_hidden=column("cu_hidden", cu_hidden, requests + 1),
        num_committed=column("num_committed", num_committed),
        cu_num_draft=column("cu_num_draft", cu_num_draft, requests + 1),
        draft_token_ids=column("draft_token_ids", draft_token_ids, draft_token_ids.shape[0]),
        token_table=call.data("token_table", token_table, paddle.int32, (num_slots, max_tokens_per_row)),
        block_table=call.data("block_table", block_table, paddle.int32, (num_slots, max_blocks)),
        hidden=call.data("hidden", hidden, dtype, (num_hidden, width)),
        block_hidden=call.data("block_hidden", block_hidden, dtype, (num_blocks, width)),
        request_hidden=call.data("request_hidden", request_hidden, dtype, (num_kept, width)),
        **{f"out_{name}": tensor for name, tensor in out.items()},
    )
    return tuple(out.values())


def mtp_postprocess(call: CallBuilder, *args: Any) -> Outputs:
    """Lower mtp_postprocess_."""
    slots, num_committed, cu_num_draft, block_table, logits, hidden, draft_token_ids = args[:7]
    block_size, step, num_next = args[7:]
    (requests,) = slots.shape
    rows, vocab_size = call.matrix("logits", logits)
    _, width = call.matrix("hidden", hidden)
    num_slots, max_blocks = _table(call, "block_table", block_table)
    out = {
        "input_ids": call.output(paddle.int32, (num_next,)),
        "positions": call.output(paddle.int32, (num_next,)),
        "slot_mapping": call.output(paddle.int64, (num_next,)),
        "query_start_loc": call.output(paddle.int32, (requests + 1,)),
        "seq_lens": call.output(paddle.int32, (requests,)),
        "hidden": call.output(hidden.dtype, (num_next, width)),
    }
    call.emit(
        "mtp_postprocess",
        MtpPostprocessParams,
        num_requests=requests,
        num_rows=rows,
        num_next=num_next,
        vocab_size=vocab_size,
        num_slots=num_slots,
        max_blocks=max_blocks,
        block_size=block_size,
        step=step,
        row_bytes=width * ELEMENT_BYTES[hidden.dtype],
        slots=call.data("slots", slots, paddle.int32, (requests,)),
        num_committed=call.data("num_committed", num_committed, paddle.int32, (requests,)),
        cu_num_draft=call.data("cu_num_draft", cu_num_draft, paddle.int32, (requests + 1,)),
        block_table=call.data("block_table", block_table, paddle.int32, (num_slots, max_blocks)),
        logits=call.data("logits", logits, paddle.float32, (rows, vocab_size)),
        hidden=call.data("hidden", hidden, hidden.dtype, (rows, width)),
        draft_token_ids=call.data("draft_token_ids", draft_token_ids, paddle.int32, draft_token_ids.shape),
        **{f"out_{name}": tensor for name, tensor in out.items()},
    )
    return tuple(out.values())
