"""Drafts for requests with a grammar: the tokens that the grammar forces. See PerRequestMethod."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import DraftSource, DraftTokens, offsets
from fastdeploy_sd.worker.step.guided_rows import GuidedRows


class ForcedTokens(Proposer):
    """A partial method whose state is in the matchers.

    `guided`: its matchers have read all committed output before `propose`.
    """

    source, is_certain = DraftSource.GRAMMAR, True

    def __init__(self, guided: GuidedRows) -> None:
        self._guided = guided

    @property
    def proposer(self) -> Proposer:
        """Itself."""
        return self

    def serves(self, request: DraftRequest) -> bool:
        """Whether the request has a grammar."""
        return request.is_guided

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Return the tokens that must follow in each row, see GuidedRows.forced; it is asked before others."""
        tokens = [
            self._guided.forced(table_row, max_tokens)
            for table_row, max_tokens in zip(x.table_rows.tolist(), x.max_draft_len.tolist(), strict=True)
        ]
        token_ids = [token_id for row in tokens for token_id in row]
        return DraftTokens(np.array(token_ids, np.int32), offsets([len(row) for row in tokens]))
