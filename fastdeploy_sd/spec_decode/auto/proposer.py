"""Several methods that need no model, and the policy that chooses among what they offer. Knows no method by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fastdeploy_sd.draft_methods import DraftSource
from fastdeploy_sd.spec_decode.auto.cost import StepTimes
from fastdeploy_sd.spec_decode.auto.offers import NativeMethod, OfferTable
from fastdeploy_sd.spec_decode.auto.policy import AutoPolicy, Decision
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens


class OfferingMethod(NativeMethod, Proposer, Protocol):
    """A method that can be asked for drafts alone as well."""


class AutoProposer(Proposer):
    """Asks every method for drafts in every step, and drafts what the policy chooses: one native call.

    Args:
        methods: by source, each made for the same table rows.
        cost: what steps take.
        max_num_seqs: table rows 0 .. max_num_seqs - 1.
        max_draft_len: drafts per row at most.

    Attributes:
        policy: what chooses.
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
        drafters = {source: method.native_drafter for source, method in methods}
        self.policy = AutoPolicy(max_num_seqs, max_draft_len, list(drafters), drafters)

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
        return self.decide(x, sum(x.num_tokens.tolist())).drafts

    def decide(self, x: ProposeInput, num_kv_tokens: int) -> Decision:
        """Return what `propose` does, with what is expected of it.

        Args:
            num_kv_tokens: the sum of x.num_tokens.

        Raises:
            ValueError: as `propose`.
        """
        num_rows = len(x.table_rows)
        return self.policy.decide(x, self._offers, self._cost.times(num_rows, num_rows, num_kv_tokens), num_rows)

    def forget(self, table_rows: I32) -> None:
        """Forget the table rows in every method and in the policy."""
        for method in self._methods:
            method.forget(table_rows)
        self.policy.forget(table_rows)

    def close(self) -> None:
        """Close every method."""
        for method in self._methods:
            method.close()
