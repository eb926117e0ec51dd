"""How the drafters that read tokens only are called: one C call per step for all rows. Knows no drafting rule."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import pointer
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


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """The rows of a step, as columns.

    Attributes:
        slots: i32[R], rows of the token table, none twice.
        num_tokens: i32[R], committed tokens, never fewer than in the slot's last step.
        max_draft_len: i32[R] >= 0, `prefix` not counted.
        prefix: drafts of another method, which belong to the text but not to what is kept; None = nobody has any.
    """

    slots: I32
    num_tokens: I32
    max_draft_len: I32
    prefix: DraftTokens | None = None


def propose(op: str, handle: ctypes.c_void_p, token_table: I32, rows: DraftRows) -> DraftTokens:
    """Call `fdsd_<op>` for the rows of a step.

    Args:
        token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.

    Returns:
        At most max_draft_len[r] drafts in row r, without sources.

    Raises:
        ValueError: a shape or dtype disagrees, or the drafter refused; the text names the argument.
    """
    num_rows = len(rows.slots)
    num_slots, max_tokens_per_row = token_table.shape
    max_num_drafts = max(0, int(rows.max_draft_len.sum(dtype=np.int64)))
    token_ids, cu_num_draft = np.empty(max_num_drafts, np.int32), np.empty(num_rows + 1, np.int32)
    prefix_ids = None if rows.prefix is None else rows.prefix.token_ids
    cu_num_prefix = None if rows.prefix is None else rows.prefix.cu_num_draft
    num_prefix = 0 if cu_num_prefix is None else int(cu_num_prefix[-1])
    params = DraftProposeParams(
        handle,
        num_rows,
        num_slots,
        max_tokens_per_row,
        max_num_drafts,
        pointer("token_table", token_table, (num_slots, max_tokens_per_row), np.int32),
        pointer("slots", rows.slots, (num_rows,), np.int32),
        pointer("num_tokens", rows.num_tokens, (num_rows,), np.int32),
        pointer("max_draft_len", rows.max_draft_len, (num_rows,), np.int32),
        pointer("prefix", prefix_ids, (num_prefix,), np.int32),
        pointer("cu_num_prefix", cu_num_prefix, (num_rows + 1,), np.int32),
        token_ids.ctypes.data,
        cu_num_draft.ctypes.data,
    )
    call(op, params)
    return DraftTokens(token_ids[: cu_num_draft[-1]], cu_num_draft)
