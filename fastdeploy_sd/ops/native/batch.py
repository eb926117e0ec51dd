"""prepare_batch and gather_output_rows on NumPy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, address, pointer
from fastdeploy_sd.types import I32, I64, DraftTokens


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """What each request runs in a step, as columns; the input of prepare_batch.

    Attributes:
        num_computed: i32[R], tokens whose KV is already in the cache.
        num_new: i32[R] >= 1, tokens to run now, drafts included.
        num_known: i32[R], committed tokens + drafts; a row finishes when computed + new == known.
        slots: i32[R], the request's row of the token table.
        draft: a row with drafts must finish and run at least one committed token before them.
        block_tables: i32[R, max_blocks], padded with -1.
    """

    num_computed: I32
    num_new: I32
    num_known: I32
    slots: I32
    draft: DraftTokens
    block_tables: I32

    def num_tokens(self) -> int:
        """Return T, the tokens to run."""
        return max(0, int(np.add.reduce(self.num_new, dtype=np.int64)))

    def num_logits(self) -> int:
        """Return L: drafts + 1 for every row that finishes."""
        finishes = self.num_computed + self.num_new == self.num_known
        num_draft = self.draft.cu_num_draft[1:] - self.draft.cu_num_draft[:-1]
        return max(0, int(np.add.reduce((num_draft + 1) * finishes, dtype=np.int64)))


class BatchMaps(NamedTuple):
    """The virtual-padding maps; fields as in `types.Batch`."""

    input_ids: I32
    positions: I32
    slot_mapping: I64
    query_start_loc: I32
    seq_lens: I32
    logits_indices: I32
    cu_num_logits: I32
    batch_id_per_output: I32


class PrepareBatchParams(CParams):
    """Twin of fdsd::PrepareBatchParams; the fields of its `out` come last, in BatchMaps' order."""

    _fields_ = (
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_logits", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("max_tokens_per_row", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("num_computed", ctypes.c_void_p),
        ("num_new", ctypes.c_void_p),
        ("num_known", ctypes.c_void_p),
        ("token_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        ("cu_num_draft", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in BatchMaps._fields),
    )


class GatherOutputRowsParams(CParams):
    """Twin of fdsd::GatherOutputRowsParams."""

    _fields_ = (
        ("num_rows_in", ctypes.c_int32),
        ("num_rows_out", ctypes.c_int32),
        ("row_bytes", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


def prepare_batch(rows: BatchRows, token_table: I32, block_size: int) -> BatchMaps:
    """See `reference.batch.prepare_batch`.

    Args:
        token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.

    Raises:
        ValueError: a shape or dtype disagrees, or the counts contradict each other or the blocks.
    """
    num_requests = len(rows.num_computed)
    num_tokens, num_logits = rows.num_tokens(), rows.num_logits()
    num_slots, max_tokens_per_row = token_table.shape
    max_blocks = rows.block_tables.shape[1]
    maps = BatchMaps(
        input_ids=np.empty(num_tokens, np.int32),
        positions=np.empty(num_tokens, np.int32),
        slot_mapping=np.empty(num_tokens, np.int64),
        query_start_loc=np.empty(num_requests + 1, np.int32),
        seq_lens=np.empty(num_requests, np.int32),
        logits_indices=np.empty(num_logits, np.int32),
        cu_num_logits=np.empty(num_requests + 1, np.int32),
        batch_id_per_output=np.empty(num_logits, np.int32),
    )
    params = PrepareBatchParams(
        num_requests,
        num_tokens,
        num_logits,
        num_slots,
        block_size,
        max_tokens_per_row,
        max_blocks,
        pointer("num_computed", rows.num_computed, (num_requests,), np.int32),
        pointer("num_new", rows.num_new, (num_requests,), np.int32),
        pointer("num_known", rows.num_known, (num_requests,), np.int32),
        pointer("token_table", token_table, (num_slots, max_tokens_per_row), np.int32),
        pointer("slots", rows.slots, (num_requests,), np.int32),
        pointer("draft_token_ids", rows.draft.token_ids, (int(rows.draft.cu_num_draft[-1]),), np.int32),
        pointer("cu_num_draft", rows.draft.cu_num_draft, (num_requests + 1,), np.int32),
        pointer("block_tables", rows.block_tables, (num_requests, max_blocks), np.int32),
        *(address(array) for array in maps),
    )
    call("prepare_batch", params)
    return maps


def gather_output_rows(x: Array, indices: I32) -> Array:
    """See `reference.batch.gather_output_rows`.

    Raises:
        ValueError: x is not a contiguous matrix, or an index is outside it.
    """
    num_rows, width = x.shape
    y = np.empty((len(indices), width), x.dtype)
    params = GatherOutputRowsParams(
        num_rows,
        len(indices),
        width * x.itemsize,
        pointer("x", x, (num_rows, width), x.dtype),
        pointer("indices", indices, (len(indices),), np.int32),
        address(y),
    )
    call("gather_output_rows", params)
    return y
