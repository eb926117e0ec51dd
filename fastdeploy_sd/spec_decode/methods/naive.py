"""No speculation: plain decoding is the same path with zero drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_sd.spec_decode.proposer import ProposeInput, Proposer, ProposerContext
from fastdeploy_sd.types import DraftTokens

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig


class NaiveProposer(Proposer):
    """Never drafts, keeps no state."""

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        """Every method is made with both."""
        del config, context

    def propose(self, x: ProposeInput) -> DraftTokens:
        return DraftTokens.none(len(x.request_ids))
