"""Calls native drafters that read only tokens: one C call per step for all rows. Knows no drafting rule."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np

from fastdeploy_sd.device.arrays import address, pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import CParams
from fastdeploy_sd.device.program.bound_call import BoundCall
from fastdeploy_sd.types import I32, DraftTokens


def table_rows_params(handle: ctypes.c_void_p, table_rows: I32) -> CParams:
    """Return the params of calls of a native drafter that take only table rows i32[n]."""
    where = pointer("table_rows", table_rows, (len(table_rows),), np.int32)
    return struct_type("DraftTableRowsParams")(drafter=handle, count=len(table_rows), table_rows=where)


class DraftRows(Protocol):
    """The rows of a step, as columns.

    Attributes:
        table_rows: i32[R], rows of the token table, none twice.
        num_tokens: i32[R], committed tokens, never fewer than in the table row's last step.
        max_draft_len: i32[R] >= 0, `prefix` not counted.
        prefix: drafts of another method: part of the text, but not of the kept state; None = no row has any.
    """

    @property
    def table_rows(self) -> I32: ...

    @property
    def num_tokens(self) -> I32: ...

    @property
    def max_draft_len(self) -> I32: ...

    @property
    def prefix(self) -> DraftTokens | None: ...


class NativeDrafter(NamedTuple):
    """A drafter for other native code to call.

    Attributes:
        op: `fdsd_<op>` has it draft.
        handle: of the drafter; its maker keeps it alive.
    """

    op: str
    handle: ctypes.c_void_p


class DraftCall:
    """Has a native drafter draft for the rows of step after step.

    Args:
        op: `fdsd_<op>` drafts.
        handle: of the drafter.
    """

    def __init__(self, op: str, handle: ctypes.c_void_p) -> None:
        self.drafter = NativeDrafter(op, handle)
        self._call = BoundCall(op, struct_type("DraftProposeParams")(drafter=handle))
        # The arrays that the params point to: they are often those of the last step.
        self._token_table: I32 | None = None

    def propose(self, token_table: I32, rows: DraftRows) -> DraftTokens:
        """Draft for all rows.

        Args:
            token_table: i32[num_table_rows, max_tokens_per_row], the committed tokens of each table row.

        Returns:
            At most max_draft_len[r] drafts in row r, without sources, in new arrays, which the caller may keep.

        Raises:
            ValueError: a shape or dtype disagrees, or the drafter refused; the text names the argument.
        """
        p, num_rows, prefix = self._call.params, len(rows.table_rows), rows.prefix
        max_num_drafts = max(sum(rows.max_draft_len.tolist()), 0)
        token_ids, cu_num_draft = np.empty(max_num_drafts, np.int32), np.empty(num_rows + 1, np.int32)
        p.draft_token_ids, p.cu_num_draft = address(token_ids), address(cu_num_draft)
        per_row, per_offset = (num_rows,), (num_rows + 1,)
        p.max_num_drafts = max_num_drafts
        p.num_rows = num_rows
        if token_table is not self._token_table:
            p.token_table = pointer("token_table", token_table, token_table.shape, np.int32)
            p.num_table_rows, p.max_tokens_per_row = token_table.shape
            self._token_table = token_table
        p.table_rows = pointer("table_rows", rows.table_rows, per_row, np.int32)
        p.num_tokens = pointer("num_tokens", rows.num_tokens, per_row, np.int32)
        p.max_draft_len = pointer("max_draft_len", rows.max_draft_len, per_row, np.int32)
        p.prefix_token_ids = p.cu_num_prefix = None
        if prefix is not None:
            p.cu_num_prefix = pointer("cu_num_prefix", prefix.cu_num_draft, per_offset, np.int32)
            num_prefix = (int(prefix.cu_num_draft[-1]),)
            p.prefix_token_ids = pointer("prefix_token_ids", prefix.token_ids, num_prefix, np.int32)
        self._call.run()
        return DraftTokens(token_ids[: cu_num_draft.item(-1)], cu_num_draft)
