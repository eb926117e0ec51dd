"""The n-gram index of growing texts, in the kernel library. Knows slots and token ids, no requests."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.ops.library import CParams, call, library
from fastdeploy_sd.ops.native.arrays import pointer
from fastdeploy_sd.ops.native.draft_rows import DraftCall, DraftRows, DraftSlotsParams
from fastdeploy_sd.types import I32, DraftTokens


class NgramCreateParams(CParams):
    """Twin of fdsd::NgramCreateParams."""

    _fields_ = (
        ("num_slots", ctypes.c_int32),
        ("min_n", ctypes.c_int32),
        ("max_n", ctypes.c_int32),
        ("max_factor", ctypes.c_double),
        ("follows_copies", ctypes.c_int32),
        ("index", ctypes.c_void_p),
    )


class NgramCheckParams(CParams):
    """Twin of fdsd::NgramCheckParams."""

    _fields_ = (
        ("index", ctypes.c_void_p),
        ("num_slots", ctypes.c_int32),
        ("max_tokens_per_row", ctypes.c_int32),
        ("token_table", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class NgramRule:
    """How drafts are made.

    Attributes:
        min_n, max_n: tokens of the text's end that are looked up, 1 <= min_n <= max_n.
        max_factor: drafts per token that agreed at most, > 0.
        follows_copies: a copy that has agreed for more than max_n tokens is preferred to other places that end with the
            same n-gram, and goes on behind changed tokens. Without it, the text's last max_n tokens decide alone.
    """

    min_n: int
    max_n: int
    max_factor: float
    follows_copies: bool


class NgramIndex:
    """Where the n-grams of every slot's text occurred last.

    A table per slot and n holds 8 to 16 bytes per distinct n-gram. The time of a step does not depend on the length of
    the texts: an appended token and a look-up cost a constant each per n.

    Args:
        num_slots: slots 0 .. num_slots - 1.
        rule: what is looked up, and how drafts are made.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, num_slots: int, rule: NgramRule) -> None:
        handle = ctypes.c_void_p()
        params = NgramCreateParams(
            num_slots, rule.min_n, rule.max_n, rule.max_factor, rule.follows_copies, ctypes.addressof(handle)
        )
        call("ngram_create", params)
        self._handle = handle
        weakref.finalize(self, library().fdsd_ngram_destroy, handle)
        self._propose = DraftCall("ngram_propose", handle)

    def begin(self, slots: I32) -> None:
        """Start these slots, i32[n], with empty texts, whatever they held.

        Raises:
            ValueError: a slot is out of range, or memory is exhausted.
        """
        call("ngram_begin", DraftSlotsParams.of(self._handle, slots))

    def forget(self, slots: I32) -> None:
        """Free what these slots, i32[n], hold; one that was not begun is ignored.

        Raises:
            ValueError: a slot is out of range.
        """
        call("ngram_forget", DraftSlotsParams.of(self._handle, slots))

    def propose(self, token_table: I32, rows: DraftRows) -> DraftTokens:
        """Index what was committed since the slot's last step, then copy what followed the text's end before.

        The longest end of committed tokens + prefix, of max_n down to min_n tokens, that occurred earlier among the
        committed tokens decides, at its latest occurrence. What followed it is copied, max_factor tokens for each that
        agreed; a copy that reaches the end of the text goes on with the drafts just made, so that a repeated phrase is
        repeated further.

        With follows_copies, tokens are also compared, one by one, with those behind the place that was found. Once more
        than max_n agreed, this copy decides instead, and it goes on behind a single replaced token: until a look-up
        finds at least two more tokens than agreed since, or the next token does not agree either. Right behind a
        replaced token it is drafted from only while it paid to go on at most of the text's last changes. Behind up to
        four changed tokens it goes on with one that is among the next four of the source.

        Args:
            token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot. They must not have
                changed since they were first seen here.

        Returns:
            At most max_draft_len[r] drafts in row r, and none if no end occurred earlier.

        Raises:
            ValueError: a shape or dtype disagrees, a count or slot is out of range, a slot was not begun, its tokens
                became fewer, or memory is exhausted.

        Source: arXiv:2304.04487 (drafts from the text itself), with the copy of LZ77.
        """
        return self._propose.propose(token_table, rows)

    def check_integrity(self, token_table: I32) -> None:
        """Check every table against the text it stands for, in time proportional to all texts.

        Raises:
            ValueError: naming what is wrong.
        """
        num_slots, max_tokens_per_row = token_table.shape
        table = pointer("token_table", token_table, (num_slots, max_tokens_per_row), np.int32)
        call("ngram_check_integrity", NgramCheckParams(self._handle, num_slots, max_tokens_per_row, table))

    def num_bytes(self) -> int:
        """Return the memory of all tables."""
        function = library().fdsd_ngram_num_bytes
        function.restype = ctypes.c_int64
        return int(function(self._handle))
