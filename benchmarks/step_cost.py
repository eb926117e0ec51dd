"""Steps that verify M rows of one request: drafts that are always wrong, and a check of the number of rows.

`bench compare` imports this module from other checkouts too: its name and functions stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.proposer import ProposeInput, Proposer
from fastdeploy_sd.types import DraftTokens, RequestOutput, offsets
from fastdeploy_sd.types.stats import EngineStats

_DRAFT_TOKEN_ID = 0


class FixedDrafts(Proposer):
    """Drafts the same token `num_drafts` times: never what greedy decoding of a random model goes on with, so that
    the context grows by one token per step whatever the number of rows."""

    def __init__(self) -> None:
        self.num_drafts = 0

    def propose(self, x: ProposeInput) -> DraftTokens:
        """`num_drafts` drafts for every row that may have them."""
        counts = np.minimum(x.max_draft_len, self.num_drafts)
        return DraftTokens(np.full(counts.sum(), _DRAFT_TOKEN_ID, np.int32), offsets(counts))


def verify_rows(num_rows: int, window: tuple[EngineStats, EngineStats], outputs: Sequence[RequestOutput]) -> None:
    """Refuse the time of a step over another number of rows, e.g. where the engine had no room for every draft.

    Args:
        num_rows: of the only request: its newest token and the drafts after it.
        window: snapshots before and after the step.
        outputs: of the step.

    Raises:
        InternalError: the step did not verify num_rows - 1 drafts, or gave the request other than one token.
    """
    begin, end = window
    num_drafts = end.num_draft_tokens - begin.num_draft_tokens
    num_tokens = sum(len(output.token_ids) for output in outputs)
    if (num_drafts, num_tokens) != (num_rows - 1, 1):
        raise InternalError(
            f"step: expected {num_rows - 1} drafts verified and 1 token, got {num_drafts} and {num_tokens}"
        )
