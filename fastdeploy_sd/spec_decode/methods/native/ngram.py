"""The n-gram index of growing texts, in the kernel library. Knows table rows and token ids, no requests."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import asdict, dataclass

import numpy as np

from fastdeploy_sd.device.arrays import pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, library
from fastdeploy_sd.spec_decode.methods.native.draft_call import DraftCall, DraftRows, NativeDrafter, table_rows_params
from fastdeploy_sd.types import I32, DraftTokens


@dataclass(frozen=True, slots=True)
class NgramRule:
    """How drafts are made.

    Attributes:
        min_n, max_n: tokens of the text's end that are looked up, 1 <= min_n <= max_n.
        max_factor: drafts per token that agreed at most, > 0.
        follows_copies: a copy that agreed for more than max_n tokens beats other places that end with the same n-gram,
            and continues after changed tokens. Without it, the text's last max_n tokens decide alone.
    """

    min_n: int
    max_n: int
    max_factor: float
    follows_copies: bool


class NgramIndex:
    """Where the n-grams of every text occurred last; each is a row of the token table.

    A table per text and n holds 8 to 16 bytes per distinct n-gram. An appended token and a look-up take constant time
    per n, whatever the length of the texts.

    Args:
        num_table_rows: as many texts at most.
        rule: what is looked up, and how drafts are made.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, num_table_rows: int, rule: NgramRule) -> None:
        handle = ctypes.c_void_p()
        params = struct_type("NgramCreateParams")(
            num_table_rows=num_table_rows, **asdict(rule), index=ctypes.addressof(handle)
        )
        call("ngram_create", params)
        self._handle = handle
        weakref.finalize(self, library().fdsd_ngram_destroy, handle)
        self._propose = DraftCall("ngram_propose", handle)

    @property
    def drafter(self) -> NativeDrafter:
        """For native code that drafts with it as `propose` does."""
        return self._propose.drafter

    def begin(self, table_rows: I32) -> None:
        """Start these table rows, i32[n], with empty texts, whatever they held.

        Raises:
            ValueError: a table row is out of range, or memory is exhausted.
        """
        call("ngram_begin", table_rows_params(self._handle, table_rows))

    def forget(self, table_rows: I32) -> None:
        """Free what these table rows, i32[n], hold; one that was not begun is ignored.

        Raises:
            ValueError: a table row is out of range.
        """
        call("ngram_forget", table_rows_params(self._handle, table_rows))

    def propose(self, token_table: I32, rows: DraftRows) -> DraftTokens:
        """Index what was committed since the table row's last step, then copy what followed the text's end before.

        Suffixes of committed tokens + prefix are looked up among the committed tokens, from max_n down to min_n tokens.
        The longest one found decides, at its latest occurrence. The tokens after it are copied, max_factor for each
        that agreed. A copy that reaches the end of the text continues with its own drafts.

        With follows_copies, tokens are also compared, one by one, with those after the place that was found. Once more
        than max_n agree, this copy decides instead. It continues after one replaced token, until a look-up finds at
        least two more tokens than agreed since, or the next token does not agree either. Directly after a replaced
        token, it drafts only while that paid at most of the text's last changes. After up to four changed tokens, it
        continues with a token that is among the next four of the source.

        Args:
            token_table: i32[num_table_rows, max_tokens_per_row], committed tokens. They must not have
                changed since they were first seen here.

        Returns:
            At most max_draft_len[r] drafts in row r, and none if no end occurred earlier.

        Raises:
            ValueError: a shape or dtype disagrees, a count or a row is out of range, a row was not begun, its tokens
                became fewer, or memory is exhausted.

        Source: arXiv:2304.04487 (drafts from the text itself), with the copy of LZ77.
        """
        return self._propose.propose(token_table, rows)

    def check_integrity(self, token_table: I32) -> None:
        """Check every table against the text it stands for, in time proportional to all texts.

        Raises:
            ValueError: naming what is wrong.
        """
        num_table_rows, max_tokens_per_row = token_table.shape
        table = pointer("token_table", token_table, (num_table_rows, max_tokens_per_row), np.int32)
        params = struct_type("NgramCheckParams")(
            index=self._handle, num_table_rows=num_table_rows, max_tokens_per_row=max_tokens_per_row, token_table=table
        )
        call("ngram_check_integrity", params)

    def num_bytes(self) -> int:
        """Return the memory of all tables."""
        function = library().fdsd_ngram_num_bytes
        function.restype = ctypes.c_int64
        return int(function(self._handle))
