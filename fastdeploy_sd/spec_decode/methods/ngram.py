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
    """Where the n-grams of every text occurred last, in 8 to 16 bytes per distinct n-gram and n.

    The longest suffix of committed tokens + prefix, of max_n down to min_n tokens, decides, at its latest occurrence.
    The tokens after it are copied, max_factor for each that agreed. A copy that reaches the text's end continues with
    itself. A token takes constant time per n.

    With follows_copies, a copy of which more than max_n tokens agree decides instead. It continues after one replaced
    token, while that paid at the text's last changes, and after up to four changed ones.

    Source: arXiv:2304.04487 (drafts from the text itself), with the copy of LZ77.
    """

    def __init__(
        self,
        num_table_rows: int,
        min_n: int,
        max_n: int,
        max_factor: float,
        *,
        follows_copies: bool,
        makes_trees: bool = False,
    ) -> None:
        super().__init__(
            "ngram",
            makes_trees=makes_trees,
            keeps_earlier=makes_trees,
            num_table_rows=num_table_rows,
            min_n=min_n,
            max_n=max_n,
            max_factor=max_factor,
            follows_copies=follows_copies,
        )

    def begin(self, table_rows: I32) -> None:
        """Start these table rows, i32[n], with empty texts; raises ValueError where one is out of range."""
        self._call_rows("begin", table_rows)

    def check_integrity(self, token_table: I32) -> None:
        """Check every table against the text it stands for, in linear time; raises ValueError naming what is wrong."""
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
            makes_trees=config.draft_trees,
        )

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.index.begin(np.array([request.table_row for request in requests], np.int32))

    def num_bytes(self) -> int:
        return self.index.num_bytes()
