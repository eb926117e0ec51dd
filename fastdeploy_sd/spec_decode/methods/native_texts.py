"""Native drafters that read only the texts of table rows: one C call per step for all rows."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.device.arrays import address, pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import BoundCall, call, library
from fastdeploy_sd.spec_decode.proposer import ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens


class NativeDrafter(NamedTuple):
    """A drafter that native code calls by `fdsd_<op>`; the owner of the handle keeps it alive."""

    op: str
    handle: ctypes.c_void_p


class NativeTexts:
    """A native drafter and its texts, one per table row; raises ValueError for a field out of range.

    Args:
        kind: of the drafter: `fdsd_<kind>_create` makes it.
        makes_trees: whether drafts branch; else they are chains.
        fields: of the params of that call.
    """

    def __init__(self, kind: str, *, makes_trees: bool = False, **fields: Any) -> None:
        self._kind, self._handle, self.makes_trees = kind, ctypes.c_void_p(), makes_trees
        create = struct_type(f"{kind.capitalize()}CreateParams")
        call(f"{kind}_create", create(**fields, drafter=ctypes.addressof(self._handle)))
        weakref.finalize(self, getattr(library(), f"fdsd_{kind}_destroy"), self._handle)
        self.drafter = NativeDrafter(f"{kind}_propose", self._handle)
        self._call = BoundCall(self.drafter.op, struct_type("DraftProposeParams")(drafter=self._handle))
        # The array that the params point to: it is often that of the last step.
        self._token_table: I32 | None = None

    def forget(self, table_rows: I32) -> None:
        """Free the texts of these table rows, i32[n], as far as begun; raises ValueError where one is out of range."""
        self._call_rows("forget", table_rows)

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Read the new tokens of all rows, and draft for them; drafts are in new arrays, without sources.

        Committed tokens must not have changed since they were first seen here. Raises ValueError: a shape or dtype
        disagrees, or the drafter refused; the text names the argument.
        """
        p, num_rows, prefix = self._call.params, len(x.table_rows), x.prefix
        max_num_drafts = max(sum(x.max_draft_len.tolist()), 0)
        token_ids, cu_num_draft = np.empty(max_num_drafts, np.int32), np.empty(num_rows + 1, np.int32)
        p.draft_token_ids, p.cu_num_draft = address(token_ids), address(cu_num_draft)
        parents = np.empty(max_num_drafts, np.int32) if self.makes_trees else None
        p.draft_parents = None if parents is None else address(parents)
        p.max_num_drafts, p.num_rows = max_num_drafts, num_rows
        if x.token_table is not self._token_table:
            p.token_table = pointer("token_table", x.token_table, x.token_table.shape, np.int32)
            p.num_table_rows, p.max_tokens_per_row = x.token_table.shape
            self._token_table = x.token_table
        per_row = (num_rows,)
        p.table_rows = pointer("table_rows", x.table_rows, per_row, np.int32)
        p.num_tokens = pointer("num_tokens", x.num_tokens, per_row, np.int32)
        p.max_draft_len = pointer("max_draft_len", x.max_draft_len, per_row, np.int32)
        p.prefix_token_ids = p.cu_num_prefix = None
        if prefix is not None:
            p.cu_num_prefix = pointer("cu_num_prefix", prefix.cu_num_draft, (num_rows + 1,), np.int32)
            num_prefix = (prefix.cu_num_draft.item(-1),)
            p.prefix_token_ids = pointer("prefix_token_ids", prefix.token_ids, num_prefix, np.int32)
        self._call.run()
        num_drafts = cu_num_draft.item(-1)
        if parents is None:
            return DraftTokens(token_ids[:num_drafts], cu_num_draft)
        return DraftTokens(token_ids[:num_drafts], cu_num_draft, parents=parents[:num_drafts]).without_chains()

    def num_bytes(self) -> int:
        function = getattr(library(), f"fdsd_{self._kind}_num_bytes")
        function.restype = ctypes.c_int64
        return int(function(self._handle))

    def _call_rows(self, op: str, table_rows: I32) -> None:
        where = pointer("table_rows", table_rows, (len(table_rows),), np.int32)
        params = struct_type("DraftTableRowsParams")(drafter=self._handle, count=len(table_rows), table_rows=where)
        call(f"{self._kind}_{op}", params)


class TextProposer(Proposer):
    """A method that drafts with native texts; a subclass begins them."""

    _texts: NativeTexts

    @property
    def native_drafter(self) -> NativeDrafter:
        return self._texts.drafter

    @property
    def makes_trees(self) -> bool:
        return self._texts.makes_trees

    def propose(self, x: ProposeInput) -> DraftTokens:
        return self._texts.propose(x)

    def forget(self, table_rows: I32) -> None:
        self._texts.forget(table_rows)
