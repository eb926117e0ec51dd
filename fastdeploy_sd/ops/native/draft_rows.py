"""How the drafters that read tokens only are called: one C call per step for all rows. Knows no drafting rule."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np

from fastdeploy_sd.ops.library import CParams
from fastdeploy_sd.ops.native.arrays import pointer
from fastdeploy_sd.ops.native.standing_call import Room, StandingCall
from fastdeploy_sd.types import I32, DraftTokens


class DraftSlotsParams(CParams):
    """Twin of fdsd::DraftSlotsParams."""

    _fields_ = (("drafter", ctypes.c_void_p), ("count", ctypes.c_int32), ("slots", ctypes.c_void_p))

    @classmethod
    def of(cls, handle: ctypes.c_void_p, slots: I32) -> DraftSlotsParams:
        """The slots i32[n] of a native drafter."""
        return cls(handle, len(slots), pointer("slots", slots, (len(slots),), np.int32))


class DraftProposeParams(CParams):
    """Twin of fdsd::DraftProposeParams."""

    _fields_ = (
        ("drafter", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("max_tokens_per_row", ctypes.c_int32),
        ("max_num_drafts", ctypes.c_int32),
        ("token_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("max_draft_len", ctypes.c_void_p),
        ("prefix_token_ids", ctypes.c_void_p),
        ("cu_num_prefix", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        ("cu_num_draft", ctypes.c_void_p),
    )


class DraftRows(Protocol):
    """The rows of a step, as columns.

    Attributes:
        slots: i32[R], rows of the token table, none twice.
        num_tokens: i32[R], committed tokens, never fewer than in the slot's last step.
        max_draft_len: i32[R] >= 0, `prefix` not counted.
        prefix: drafts of another method, which belong to the text but not to what is kept; None = nobody has any.
    """

    @property
    def slots(self) -> I32: ...

    @property
    def num_tokens(self) -> I32: ...

    @property
    def max_draft_len(self) -> I32: ...

    @property
    def prefix(self) -> DraftTokens | None: ...


class DraftCall:
    """Has a native drafter draft for the rows of step after step.

    Args:
        op: `fdsd_<op>` drafts.
        handle: of the drafter.
    """

    def __init__(self, op: str, handle: ctypes.c_void_p) -> None:
        self._params = DraftProposeParams(handle)
        self._call = StandingCall(op, self._params)
        self._token_ids, self._cu_num_draft = Room(np.int32), Room(np.int32)
        self._bound: tuple[I32, DraftRows] | None = None

    def propose(self, token_table: I32, rows: DraftRows) -> DraftTokens:
        """Draft for all rows.

        Args:
            token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.
            rows: both are the same objects as last time if only what is in their arrays differs.

        Returns:
            At most max_draft_len[r] drafts in row r, without sources, in arrays of their own.

        Raises:
            ValueError: a shape or dtype disagrees, or the drafter refused; the text names the argument.
        """
        if self._bound is None or self._bound[0] is not token_table or self._bound[1] is not rows:
            self._bound = None  # until all are bound
            self._bind_rows(token_table, rows, len(rows.slots))
            self._bound = token_table, rows
        max_num_drafts = sum(rows.max_draft_len.tolist())
        if max_num_drafts > self._params.max_num_drafts:
            self._params.max_num_drafts = self._reserve("draft_token_ids", self._token_ids, max_num_drafts)
        self._call.run()
        # Whoever gets the drafts may keep them for longer than a step.
        cu_num_draft = self._cu_num_draft.first(len(rows.slots) + 1).copy()
        return DraftTokens(self._token_ids.whole[: cu_num_draft.item(-1)].copy(), cu_num_draft)

    def _bind_rows(self, token_table: I32, rows: DraftRows, num_rows: int) -> None:
        bind, params, per_row, prefix = self._call.bind, self._params, (num_rows,), rows.prefix
        bind("token_table", token_table, token_table.shape, np.int32)
        bind("slots", rows.slots, per_row, np.int32)
        bind("num_tokens", rows.num_tokens, per_row, np.int32)
        bind("max_draft_len", rows.max_draft_len, per_row, np.int32)
        if prefix is None:
            bind("prefix_token_ids", None, (), np.int32)
            bind("cu_num_prefix", None, (), np.int32)
        else:
            bind("prefix_token_ids", prefix.token_ids, (int(prefix.cu_num_draft[-1]),), np.int32)
            bind("cu_num_prefix", prefix.cu_num_draft, (num_rows + 1,), np.int32)
        params.num_rows = num_rows
        params.num_slots, params.max_tokens_per_row = token_table.shape
        self._reserve("cu_num_draft", self._cu_num_draft, num_rows + 1)

    def _reserve(self, name: str, room: Room, size: int) -> int:
        """Have room for so many results; returns for how many there is."""
        if room.reserve(size):
            self._call.bind(name, room.whole, room.whole.shape, np.int32)
        return len(room.whole)
