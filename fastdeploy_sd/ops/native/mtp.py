"""mtp_preprocess_ and mtp_postprocess_ on NumPy arrays, and what their calls are made of."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, pointer
from fastdeploy_sd.types import F32, I32

A = TypeVar("A", bound=Any)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """The requests that draft, as columns on the host; constant over the passes of a step.

    Attributes:
        slots: i32[R], row of the two tables.
        num_committed: i32[R], committed tokens.
        cu_num_draft: i32[R+1], the drafts that each request gets.
        draft_token_ids: i32[D], filled in pass by pass.
        token_table: i32[num_slots, max_tokens_per_row], committed tokens.
        block_table: i32[num_slots, max_blocks], -1 past the request's own blocks.
    """

    slots: I32
    num_committed: I32
    cu_num_draft: I32
    draft_token_ids: I32
    token_table: I32
    block_table: I32
    block_size: int

    def num_drafting(self, step: int) -> int:
        """Requests with more than `step` drafts."""
        return int((np.diff(self.cu_num_draft) > step).sum())


@dataclass(frozen=True, slots=True, eq=False)
class MtpPass:
    """What one draft layer computes: request r the KV slots [begin[r], end[r]), none where these are equal.

    Attributes:
        begin, end: i32[R], begin >= 1.
        source: the layer whose output the hidden rows are; 0 = the target.
        hidden_begin: i32[R], position of the request's first hidden row.
        hidden_end: i32[R]: rows of positions [hidden_begin, hidden_end) belong to committed tokens and are kept.
        cu_hidden: i32[R+1], row r owns hidden rows [cu[r], cu[r+1]).
    """

    begin: I32
    end: I32
    source: int
    hidden_begin: I32
    hidden_end: I32
    cu_hidden: I32

    def num_tokens(self) -> int:
        """Return T, the rows to run."""
        return max(0, int((self.end - self.begin).sum(dtype=np.int64)))


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows(Generic[A]):
    """Hidden rows of one source layer: this step's, and those kept from earlier ones. f32 or bf16.

    Attributes:
        step: [rows, H].
        blocks: [num_blocks, H], the row of the last token of every full block; written.
        requests: [num_slots, H], each request's newest row; written.
    """

    step: A
    blocks: A
    requests: A


class MtpInputs(NamedTuple):
    """What a draft layer runs on: the maps as in `types.Batch`.

    Attributes:
        draft_rows: i32[A], the last row of every request that drafts.
        hidden: [T, H], the row of the position before each token.
    """

    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    draft_rows: Any
    hidden: Any


class NextInputs(NamedTuple):
    """The same for the pass that continues after a draft: every row drafts."""

    input_ids: Any
    positions: Any
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    hidden: Any


class MtpPreprocessParams(CParams):
    """Twin of fdsd::MtpPreprocessParams; the fields of its `out` come last, in MtpInputs' order."""

    _fields_ = (
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_draft_rows", ctypes.c_int32),
        ("num_hidden", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("max_tokens_per_row", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("source", ctypes.c_int32),
        ("row_bytes", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("hidden_begin", ctypes.c_void_p),
        ("hidden_end", ctypes.c_void_p),
        ("cu_hidden", ctypes.c_void_p),
        ("num_committed", ctypes.c_void_p),
        ("cu_num_draft", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        ("token_table", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("block_hidden", ctypes.c_void_p),
        ("request_hidden", ctypes.c_void_p),
        *((f"out_{name}", ctypes.c_void_p) for name in MtpInputs._fields),
    )


class MtpPostprocessParams(CParams):
    """Twin of fdsd::MtpPostprocessParams; the fields of its `out` come last, in NextInputs' order."""

    _fields_ = (
        ("num_requests", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_next", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("row_bytes", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_committed", ctypes.c_void_p),
        ("cu_num_draft", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        *((f"out_{name}", ctypes.c_void_p) for name in NextInputs._fields),
    )


def mtp_preprocess_(batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Array]) -> MtpInputs:
    """See `reference.mtp.mtp_preprocess_`.

    Raises:
        ValueError: a shape or dtype disagrees, or counts, positions, blocks and offsets contradict each other; nothing
            is written then.
    """
    num_requests, num_tokens, num_drafting = len(batch.slots), todo.num_tokens(), batch.num_drafting(todo.source)
    num_slots, max_tokens_per_row = batch.token_table.shape
    num_hidden, width = hidden.step.shape
    num_blocks, max_blocks, dtype = len(hidden.blocks), batch.block_table.shape[1], hidden.step.dtype
    out = MtpInputs(
        input_ids=np.empty(num_tokens, np.int32),
        positions=np.empty(num_tokens, np.int32),
        slot_mapping=np.empty(num_tokens, np.int64),
        query_start_loc=np.empty(num_requests + 1, np.int32),
        seq_lens=np.empty(num_requests, np.int32),
        draft_rows=np.empty(num_drafting, np.int32),
        hidden=np.empty((num_tokens, width), dtype),
    )
    params = MtpPreprocessParams(
        num_requests,
        num_tokens,
        num_drafting,
        num_hidden,
        num_slots,
        max_tokens_per_row,
        max_blocks,
        num_blocks,
        batch.block_size,
        todo.source,
        width * dtype.itemsize,
        pointer("slots", batch.slots, (num_requests,), np.int32),
        pointer("begin", todo.begin, (num_requests,), np.int32),
        pointer("end", todo.end, (num_requests,), np.int32),
        pointer("hidden_begin", todo.hidden_begin, (num_requests,), np.int32),
        pointer("hidden_end", todo.hidden_end, (num_requests,), np.int32),
        pointer("cu_hidden", todo.cu_hidden, (num_requests + 1,), np.int32),
        pointer("num_committed", batch.num_committed, (num_requests,), np.int32),
        pointer("cu_num_draft", batch.cu_num_draft, (num_requests + 1,), np.int32),
        pointer("draft_token_ids", batch.draft_token_ids, (int(batch.cu_num_draft[-1]),), np.int32),
        pointer("token_table", batch.token_table, (num_slots, max_tokens_per_row), np.int32),
        pointer("block_table", batch.block_table, (num_slots, max_blocks), np.int32),
        pointer("hidden.step", hidden.step, (num_hidden, width), dtype),
        pointer("hidden.blocks", hidden.blocks, (num_blocks, width), dtype),
        pointer("hidden.requests", hidden.requests, (num_slots, width), dtype),
        *(array.ctypes.data for array in out),
    )
    call("mtp_preprocess", params)
    return out


def mtp_postprocess_(batch: DraftBatch, step: int, logits: F32, hidden: Array) -> NextInputs:
    """See `reference.mtp.mtp_postprocess_`.

    Raises:
        ValueError: a shape or dtype disagrees, or a request has no block for its next slot.
    """
    num_requests, num_next = len(batch.slots), batch.num_drafting(step + 1)
    (num_rows, vocab_size), width = logits.shape, hidden.shape[1]
    num_slots, max_blocks = batch.block_table.shape
    out = NextInputs(
        input_ids=np.empty(num_next, np.int32),
        positions=np.empty(num_next, np.int32),
        slot_mapping=np.empty(num_next, np.int64),
        query_start_loc=np.empty(num_requests + 1, np.int32),
        seq_lens=np.empty(num_requests, np.int32),
        hidden=np.empty((num_next, width), hidden.dtype),
    )
    params = MtpPostprocessParams(
        num_requests,
        num_rows,
        num_next,
        vocab_size,
        num_slots,
        max_blocks,
        batch.block_size,
        step,
        width * hidden.itemsize,
        pointer("slots", batch.slots, (num_requests,), np.int32),
        pointer("num_committed", batch.num_committed, (num_requests,), np.int32),
        pointer("cu_num_draft", batch.cu_num_draft, (num_requests + 1,), np.int32),
        pointer("block_table", batch.block_table, (num_slots, max_blocks), np.int32),
        pointer("logits", logits, (num_rows, vocab_size), np.float32),
        pointer("hidden", hidden, (num_rows, width), hidden.dtype),
        pointer("draft_token_ids", batch.draft_token_ids, (int(batch.cu_num_draft[-1]),), np.int32),
        *(array.ctypes.data for array in out),
    )
    call("mtp_postprocess", params)
    return out
