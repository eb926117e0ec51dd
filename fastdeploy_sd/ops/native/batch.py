"""prepare_batch, append_tokens and gather_output_rows on NumPy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import Array, address, pointer
from fastdeploy_sd.ops.native.standing_call import Room, StandingCall
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
    output_positions: I32


class PrepareBatchParams(CParams):
    """Twin of fdsd::PrepareBatchParams; the fields of its `out` in BatchMaps' order."""

    _fields_ = (
        ("num_requests", ctypes.c_int32),
        ("max_num_tokens", ctypes.c_int32),
        ("max_num_logits", ctypes.c_int32),
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
        ("totals", ctypes.c_void_p),
    )


class AppendTokensParams(CParams):
    """Twin of fdsd::AppendTokensParams."""

    _fields_ = (
        ("num_requests", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("max_tokens_per_row", ctypes.c_int32),
        ("num_count_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("slots", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("cu_num_output", ctypes.c_void_p),
        ("count_rows", ctypes.c_void_p),
        ("token_table", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("token_counts", ctypes.c_void_p),
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


class BatchMapper:
    """Makes the maps of step after step, in memory that the steps share.

    Args:
        token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.
    """

    def __init__(self, token_table: I32, block_size: int) -> None:
        self._params = PrepareBatchParams(block_size=block_size)
        self._params.num_slots, self._params.max_tokens_per_row = token_table.shape
        self._call = StandingCall("prepare_batch", self._params)
        self._call.bind("token_table", token_table, token_table.shape, np.int32)
        self._totals = np.zeros(2, np.int32)
        self._call.bind("totals", self._totals, (2,), np.int32)
        self._rooms = {name: Room(np.int64 if name == "slot_mapping" else np.int32) for name in BatchMaps._fields}
        self._rows: BatchRows | None = None
        self._sizes = -1, -1, -1
        self._maps: BatchMaps | None = None

    def prepare(self, rows: BatchRows) -> BatchMaps:
        """See `reference.batch.prepare_batch`.

        Args:
            rows: the same object as last time if only what is in its arrays differs.

        Returns:
            Arrays that hold until the next call; the same object as last time if all of them are as long.

        Raises:
            ValueError: a shape or dtype disagrees, or the counts contradict each other or the blocks.
        """
        num_requests = len(rows.num_computed)
        if rows is not self._rows:
            self._rows = None  # until all are bound
            self._bind_rows(rows, num_requests)
            self._make_room(self._params.max_num_tokens, self._params.max_num_logits, num_requests)
            self._rows = rows
        self._call.run()
        num_tokens, num_logits = self._totals.tolist()
        if num_tokens > self._params.max_num_tokens or num_logits > self._params.max_num_logits:
            self._make_room(num_tokens, num_logits, num_requests)
            self._call.run()
        sizes = num_tokens, num_logits, num_requests
        if self._maps is None or sizes != self._sizes:
            self._sizes, self._maps = sizes, self._cut(*sizes)
        return self._maps

    def _bind_rows(self, rows: BatchRows, num_requests: int) -> None:
        bind, per_request, draft = self._call.bind, (num_requests,), rows.draft
        bind("num_computed", rows.num_computed, per_request, np.int32)
        bind("num_new", rows.num_new, per_request, np.int32)
        bind("num_known", rows.num_known, per_request, np.int32)
        bind("slots", rows.slots, per_request, np.int32)
        bind("draft_token_ids", draft.token_ids, (int(draft.cu_num_draft[-1]),), np.int32)
        bind("cu_num_draft", draft.cu_num_draft, (num_requests + 1,), np.int32)
        max_blocks = rows.block_tables.shape[1]
        bind("block_tables", rows.block_tables, (num_requests, max_blocks), np.int32)
        self._params.num_requests, self._params.max_blocks = num_requests, max_blocks

    def _make_room(self, num_tokens: int, num_logits: int, num_requests: int) -> None:
        for name, room in self._rooms.items():
            if room.reserve(_num_rows(name, num_tokens, num_logits, num_requests)):
                self._maps = None  # its views are of the memory before
            self._call.bind(name, room.whole, room.whole.shape, room.whole.dtype)
        self._params.max_num_tokens = len(self._rooms["input_ids"].whole)
        self._params.max_num_logits = len(self._rooms["logits_indices"].whole)

    def _cut(self, num_tokens: int, num_logits: int, num_requests: int) -> BatchMaps:
        return BatchMaps(
            *(room.first(_num_rows(name, num_tokens, num_logits, num_requests)) for name, room in self._rooms.items())
        )


def _num_rows(name: str, num_tokens: int, num_logits: int, num_requests: int) -> int:
    """How long a map is."""
    if name in ("input_ids", "positions", "slot_mapping"):
        return num_tokens
    if name == "seq_lens":
        return num_requests
    return num_requests + 1 if name in ("query_start_loc", "cu_num_logits") else num_logits


def prepare_batch(rows: BatchRows, token_table: I32, block_size: int) -> BatchMaps:
    """See `reference.batch.prepare_batch`; what a BatchMapper does, once.

    Args:
        token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.

    Raises:
        ValueError: a shape or dtype disagrees, or the counts contradict each other or the blocks.
    """
    return BatchMapper(token_table, block_size).prepare(rows)


class TokenTables(NamedTuple):
    """What the requests' tokens are kept in.

    Attributes:
        tokens: i32[num_slots, max_tokens_per_row].
        num_tokens: i32[num_slots], how many of a row are committed.
        counts: i32[num_count_rows, V]; see `types.SamplingArrays.token_counts`.
    """

    tokens: I32
    num_tokens: I32
    counts: I32


class OutputRows(NamedTuple):
    """The output of a step's rows.

    Attributes:
        slots: i32[R], rows of the token table, none twice.
        token_ids: i32[O], row r owns token_ids[cu_num_output[r]:cu_num_output[r + 1]].
        cu_num_output: i32[R+1].
        count_rows: i32[R], row of the counts, -1 = not counted.
    """

    slots: I32
    token_ids: I32
    cu_num_output: I32
    count_rows: I32


class TokenAppender:
    """Puts the output of step after step into the tables."""

    def __init__(self) -> None:
        self._params = AppendTokensParams()
        self._call = StandingCall("append_tokens", self._params)
        self._output: OutputRows | None = None
        self._tables: TokenTables | None = None

    def append(self, output: OutputRows, tables: TokenTables) -> None:
        """See `reference.batch.append_tokens`; the tables are changed in place.

        Args:
            output, tables: the same objects as last time if only what is in their arrays differs.

        Raises:
            ValueError: a shape or dtype disagrees, a row is outside its table, a counted token is outside the
                vocabulary, or the output has no room. Nothing has changed then.
        """
        if output is not self._output or tables is not self._tables:
            self._output = self._tables = None  # until all are bound
            self._bind_output(output)
            self._bind_tables(tables)
            self._output, self._tables = output, tables
        self._call.run()

    def _bind_output(self, output: OutputRows) -> None:
        bind, num_requests = self._call.bind, len(output.slots)
        bind("slots", output.slots, (num_requests,), np.int32)
        bind("token_ids", output.token_ids, (int(output.cu_num_output[-1]),), np.int32)
        bind("cu_num_output", output.cu_num_output, (num_requests + 1,), np.int32)
        bind("count_rows", output.count_rows, (num_requests,), np.int32)
        self._params.num_requests = num_requests

    def _bind_tables(self, tables: TokenTables) -> None:
        bind, params = self._call.bind, self._params
        params.num_slots, params.max_tokens_per_row = tables.tokens.shape
        params.num_count_rows, params.vocab_size = tables.counts.shape
        bind("token_table", tables.tokens, tables.tokens.shape, np.int32)
        bind("num_tokens", tables.num_tokens, (len(tables.tokens),), np.int32)
        bind("token_counts", tables.counts, tables.counts.shape, np.int32)


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
