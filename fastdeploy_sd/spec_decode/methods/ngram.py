"""Drafts copied from the request's own text. Knows no model and no other request; the search is a native kernel's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_sd.spec_decode.methods.native.draft_call import NativeDrafter
from fastdeploy_sd.spec_decode.methods.native.ngram import NgramIndex, NgramRule
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, ProposerContext
from fastdeploy_sd.types import I32, DraftTokens

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig


class NgramProposer(Proposer):
    """Guesses that what followed the text's last tokens before follows them again.

    The text is prompt + output. Its longest suffix of `min_ngram_size` .. `max_ngram_size` tokens that occurred before
    decides, at its latest occurrence. With `follow_copies`, a longer copy is continued, also after changed tokens.
    See NgramIndex.propose.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        rule = NgramRule(
            min_n=config.min_ngram_size,
            max_n=config.max_ngram_size,
            max_factor=config.ngram_max_spec_factor,
            follows_copies=config.follow_copies,
        )
        self._index = NgramIndex(context.max_num_seqs, rule)

    @property
    def native_drafter(self) -> NativeDrafter:
        """What drafts, for native code that asks it itself."""
        return self._index.drafter

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start an index per request; its tokens are indexed in its first step."""
        self._index.begin(np.array([request.table_row for request in requests], np.int32))

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Index the new tokens of all rows, and draft for those that may.

        Raises:
            ValueError: a table row was not begun, or the arrays contradict each other.
        """
        return self._index.propose(x.token_table, x)

    def forget(self, table_rows: I32) -> None:
        """Free the indexes of these table rows."""
        self._index.forget(table_rows)

    def check_integrity(self, token_table: I32) -> None:
        """Check the indexes against the texts; see NgramIndex.check_integrity."""
        self._index.check_integrity(token_table)

    def num_bytes(self) -> int:
        """Return the memory of all indexes."""
        return self._index.num_bytes()
