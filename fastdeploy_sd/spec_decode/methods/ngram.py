"""Drafts copied from the request's own text, looked up by a native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_sd.device.arrays import pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call
from fastdeploy_sd.spec_decode.methods.native_texts import NativeTexts, TextProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposerContext
from fastdeploy_sd.types import I32

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig


class NgramIndex(NativeTexts):
    """Where the n-grams of every text occurred last: 8 to 16 bytes per distinct n-gram and n.

    An appended token and a look-up take constant time per n, whatever the length of the texts.

    Suffixes of committed tokens + prefix are looked up among the committed tokens, from max_n down to min_n tokens.
    The longest one found decides, at its latest occurrence. The tokens after it are copied, max_factor for each that
    agreed. A copy that reaches the end of the text continues with its own drafts.

    With follows_copies, tokens are also compared, one by one, with those after the place that was found. Once more
    than max_n agree, this copy decides instead. It continues after one replaced token, until a look-up finds at least
    two more tokens than agreed since, or the next token does not agree either. Directly after a replaced token, it
    drafts only while that paid at most of the text's last changes. After up to four changed tokens, it continues with
    a token that is among the next four of the source.

    Raises:
        ValueError: a number is out of range.

    Source: arXiv:2304.04487 (drafts from the text itself), with the copy of LZ77.
    """

    def __init__(self, num_table_rows: int, min_n: int, max_n: int, max_factor: float, *, follows_copies: bool) -> None:
        super().__init__(
            "ngram",
            num_table_rows=num_table_rows,
            min_n=min_n,
            max_n=max_n,
            max_factor=max_factor,
            follows_copies=follows_copies,
        )

    def begin(self, table_rows: I32) -> None:
        """Start these table rows, i32[n], with empty texts, whatever they held.

        Raises:
            ValueError: a table row is out of range, or memory is exhausted.
        """
        self._call_rows("begin", table_rows)

    def check_integrity(self, token_table: I32) -> None:
        """Check every table against the text it stands for, in time proportional to all texts.

        Raises:
            ValueError: naming what is wrong.
        """
        num_table_rows, max_tokens_per_row = token_table.shape
        table = pointer("token_table", token_table, token_table.shape, np.int32)
        params = struct_type("NgramCheckParams")(
            index=self._handle, num_table_rows=num_table_rows, max_tokens_per_row=max_tokens_per_row, token_table=table
        )
        call("ngram_check_integrity", params)


class NgramProposer(TextProposer):
    """Guesses that what followed the text's last tokens before follows them again; see NgramIndex."""

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        self._texts = self.index = NgramIndex(
            context.max_num_seqs,
            config.min_ngram_size,
            config.max_ngram_size,
            config.ngram_max_spec_factor,
            follows_copies=config.follow_copies,
        )

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start an index per request; its tokens are indexed in its first step."""
        self.index.begin(np.array([request.table_row for request in requests], np.int32))

    def num_bytes(self) -> int:
        """Return the memory of all indexes."""
        return self.index.num_bytes()
