"""Membership: the requests of a step, and what of them is the same in every step that runs the same requests.

A decoding batch keeps its members for many steps. What depends on them only is gathered from the request table once per
membership, not once per step. Knows no plan and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastdeploy_sd.types import EMPTY_I32, I32, DraftTokens, RequestId, SamplingArrays
from fastdeploy_sd.worker.slot_rules import SlotRules


class Membership:
    """Row r is request_ids[r] in every array. The steps share them: nobody writes to any but `counts`.

    Attributes:
        request_ids: the members, in the order of the plan.
        slots: i32[R], their rows of the request table.
        max_total: i32[R], tokens after which each one ends.
        num_draft_logprobs: i32[R], None when nobody wants log-probabilities of drafts.
        masked_rows: the rows with rules that may forbid a token, and these rules.
        penalty_slots: i32[R], the row in which the output is counted, -1 = it is not.
        counts: num_computed, num_new and num_known of `BatchRows`, i32[R] each, written anew in every step.
        no_drafts: none for any row.
        block_tables: i32[R, n], every row's blocks, padded with -1; None after one of them grew.
    """

    def __init__(
        self,
        request_ids: tuple[RequestId, ...],
        slots: I32,
        max_total: I32,
        num_draft_logprobs: I32 | None,
        sampling: SamplingArrays,
        rules: Sequence[SlotRules],
    ) -> None:
        """Gather what stays the same.

        Args:
            sampling: of the members, with no logits rows: no token is forbidden.
            rules: of row r.
        """
        self.request_ids, self.slots, self.max_total = request_ids, slots, max_total
        self.num_draft_logprobs = num_draft_logprobs
        self.masked_rows = tuple((row, rule) for row, rule in enumerate(rules) if rule.has_mask)
        self.penalty_slots = sampling.penalty_slot
        num_computed, num_new, num_known = np.zeros((3, len(slots)), np.int32)
        self.counts: tuple[I32, I32, I32] = num_computed, num_new, num_known
        self.no_drafts = DraftTokens.none(len(slots))
        self.block_tables: I32 | None = None
        self._sampling = sampling
        self._unmasked: dict[int, SamplingArrays] = {}

    def unmasked_sampling(self, num_rows: int) -> SamplingArrays:
        """The sampling parameters of a step with this many logits rows, L, none of which forbids a token."""
        found = self._unmasked.get(num_rows)
        if found is None:
            found = self._unmasked[num_rows] = self.masked_sampling(np.zeros(num_rows + 1, np.int32), EMPTY_I32)
        return found

    def masked_sampling(self, cu_mask: I32, mask_token_ids: I32) -> SamplingArrays:
        """The sampling parameters of a step with forbidden tokens, i32[L+1] and i32[K]."""
        return replace(self._sampling, cu_mask=cu_mask, mask_token_ids=mask_token_ids)
