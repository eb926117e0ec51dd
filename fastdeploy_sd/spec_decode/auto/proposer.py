"""Several methods that need no model, and the policy that chooses among what they offer. Knows no method by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fastdeploy_sd.draft_methods import DraftSource
from fastdeploy_sd.spec_decode.auto.cost import StepTimes
from fastdeploy_sd.spec_decode.auto.offers import OfferingProposer, OfferTable
from fastdeploy_sd.spec_decode.auto.policy import AutoPolicy, Decision, PolicyInput
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens


class OfferingMethod(OfferingProposer, Proposer, Protocol):
    """A method that can be asked for drafts alone as well."""


class AutoProposer(Proposer):
    """Asks every method for drafts in every step, and drafts what the policy chooses.

    Args:
        methods: by source, each made for the same table rows.
        cost: what steps take.
        max_num_seqs: table rows 0 .. max_num_seqs - 1.
        max_draft_len: drafts per row at most.

    Attributes:
        decision: the latest; None before the first.
        has_offers: whether anything was offered for it.
    """

    def __init__(
        self,
        methods: Sequence[tuple[DraftSource, OfferingMethod]],
        cost: StepTimes,
        max_num_seqs: int,
        max_draft_len: int,
    ) -> None:
        self._methods = [method for _, method in methods]
        self._cost = cost
        self._offers = OfferTable(len(methods), max_num_seqs, max_draft_len)
        self.decision: Decision | None = None
        self.has_offers = False
        self.policy = AutoPolicy(max_num_seqs, max_draft_len, [source for source, _ in methods])

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Begin the requests in every method and in the policy."""
        for method in self._methods:
            method.begin(requests)
        self.policy.begin(np.array([request.table_row for request in requests], np.int32))

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Return the drafts that are worth their time.

        Raises:
            ValueError: a method or the policy refused the rows.
        """
        num_rows = len(x.table_rows)
        for source, method in enumerate(self._methods):
            method.offer(x, self._offers.offer(source, num_rows))
        times = self._cost.times(num_rows, num_rows, sum(x.num_tokens.tolist()), sum(x.max_draft_len.tolist()))
        y = PolicyInput(x.table_rows, x.token_table, x.num_tokens, x.max_draft_len, num_rows, times)
        self.has_offers = bool(self._offers.planes.cu_num_draft[:, num_rows].any())
        self.decision = self.policy.decide(y, self._offers)
        return self.decision.drafts

    def forget(self, table_rows: I32) -> None:
        """Forget the table rows in every method and in the policy."""
        for method in self._methods:
            method.forget(table_rows)
        self.policy.forget(table_rows)

    def close(self) -> None:
        """Close every method."""
        for method in self._methods:
            method.close()
