"""No speculation: plain decoding is the same path with zero drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import I32, DraftTokens

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig


class NaiveProposer:
    """Never drafts, keeps no state."""

    num_lookahead_slots = 0

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        """Neither has anything to say to it; every method is made with both."""
        del config, context

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Nothing to prepare."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        """No drafts for any row."""
        return DraftTokens.none(len(x.request_ids))

    def forget(self, slots: I32) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Nothing to save."""
