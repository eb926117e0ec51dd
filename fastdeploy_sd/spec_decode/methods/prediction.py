"""Drafts from what a client predicts as its answer. Knows no model; the text is followed by a native kernel."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.spec_decode.methods.native.draft_call import NativeDrafter
from fastdeploy_sd.spec_decode.methods.native.prediction import PredictionDrafter
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftSource, DraftTokens


class PredictionProposer(Proposer):
    """A partial method: for requests with a predicted output, whatever their method; see PredictionDrafter.propose.

    Args:
        max_num_seqs: table rows 0 .. max_num_seqs - 1.
    """

    source, is_certain = DraftSource.PREDICTION, False

    def __init__(self, max_num_seqs: int) -> None:
        self._drafter = PredictionDrafter(max_num_seqs)

    @property
    def proposer(self) -> Proposer:
        """Itself."""
        return self

    @property
    def native_drafter(self) -> NativeDrafter:
        """What drafts, for native code that asks it itself."""
        return self._drafter.drafter

    def serves(self, request: DraftRequest) -> bool:
        """Whether the client predicts anything."""
        return len(request.prediction_token_ids) > 0

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Index the predicted texts. The output of a request that comes back is read in its first step.

        Raises:
            ValueError: memory is exhausted.
        """
        for request in requests:
            self._drafter.begin(request.table_row, request.num_prompt_tokens, request.prediction_token_ids)

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Follow the texts, and draft for the rows that may.

        Raises:
            ValueError: the arrays contradict each other.
        """
        return self._drafter.propose(x.token_table, x)

    def forget(self, table_rows: I32) -> None:
        """Free the texts of these table rows."""
        self._drafter.forget(table_rows)

    def num_bytes(self) -> int:
        """Return the memory of all texts."""
        return self._drafter.num_bytes()
