"""No speculation: plain decoding is the same path with zero drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdeploy_sd.spec_decode.proposer import ProposeInput, ProposerNeeds
from fastdeploy_sd.types import DraftTokens, RequestId

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig


class NaiveProposer:
    """Never drafts, keeps no state."""

    def __init__(self, config: SpeculativeConfig) -> None:
        """`config` has nothing to say to it; every method is made with one."""
        del config
        self.needs = ProposerNeeds()

    def propose(self, x: ProposeInput) -> DraftTokens:
        """No drafts for any row."""
        return DraftTokens.none(len(x.request_ids))

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Nothing to drop."""
