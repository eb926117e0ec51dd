"""Builds what drafting methods look at, after a step was verified and committed. Knows no method."""

from __future__ import annotations

import numpy as np
from paddle import Tensor

from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import Batch, SchedulerOutput, VerifyResult
from fastdeploy_sd.worker.membership import Membership
from fastdeploy_sd.worker.request_state import RequestTable


class DraftInputs:
    """Makes the ProposeInput of step after step, in memory that the steps share.

    Args:
        table: the requests and their tokens.
        has_target: whether a method looks at what the model ran.
    """

    def __init__(self, table: RequestTable, block_size: int, *, has_target: bool) -> None:
        self._table, self._block_size, self._has_target = table, block_size, has_target
        self._last: tuple[Membership, ProposeInput] | None = None

    def build(
        self, plan: SchedulerOutput, members: Membership, batch: Batch, verified: VerifyResult, hidden: Tensor
    ) -> ProposeInput:
        """Return the input of a step. It holds until the next one, which gets the same object if it differs only in
        what is in its arrays.

        Args:
            members: those of the plan; their output is committed.
            verified, hidden: of the step's batch.
        """
        if self._has_target:
            target = self._target_step(plan, members, batch, verified, hidden)
            x = self._new(members, target)
        elif self._last is not None and self._last[0] is members:
            x = self._last[1]
        else:
            x = self._new(members, None)
            self._last = members, x
        self._fill_in(x, plan, members, verified)
        return x

    def _new(self, members: Membership, target: TargetStep | None) -> ProposeInput:
        num_tokens, max_draft_len = np.zeros((2, len(members.slots)), np.int32)
        return ProposeInput(
            request_ids=members.request_ids,
            slots=members.slots,
            token_table=self._table.tokens,
            num_tokens=num_tokens,
            max_draft_len=max_draft_len,
            num_draft_logprobs=members.num_draft_logprobs,
            target=target,
        )

    def _fill_in(self, x: ProposeInput, plan: SchedulerOutput, members: Membership, verified: VerifyResult) -> None:
        # The plan was made before it was known how many drafts would be accepted. What follows must leave room for the
        # token that verification adds. A row without output gets none: its prompt is unfinished, or it failed.
        # A loop, not columns: with cold caches it takes less time, up to some hundred rows.
        planned, max_total = plan.max_draft_len.tolist(), members.max_total.tolist()
        offsets = verified.cu_num_output.tolist()
        for r, slot in enumerate(members.slots.tolist()):
            x.num_tokens[r] = num_tokens = self._table.num_tokens.item(slot)
            room = max(max_total[r] - num_tokens - 1, 0)
            x.max_draft_len[r] = min(planned[r], room) if offsets[r] < offsets[r + 1] else 0

    def _target_step(
        self, plan: SchedulerOutput, members: Membership, batch: Batch, verified: VerifyResult, hidden: Tensor
    ) -> TargetStep:
        table, slots, computed = self._table, members.slots, plan.num_computed_tokens
        produced = verified.cu_num_output[1:] > verified.cu_num_output[:-1]
        unfinished = batch.cu_num_logits[1:] == batch.cu_num_logits[:-1]
        # A row whose tokens were all run and that has no output nevertheless has failed.
        num_run = computed + plan.num_new_tokens * unfinished
        # The last block may reach past the model's length, where the rotary table ends.
        num_kv_slots = np.minimum(table.num_blocks.take(slots) * self._block_size, table.tokens.shape[1])
        return TargetStep(
            query_start_loc=batch.query_start_loc,
            num_computed_tokens=computed,
            num_valid=np.where(produced, table.num_tokens.take(slots) - 1, num_run),
            block_table=table.blocks,
            num_kv_slots=num_kv_slots,
            hidden=hidden,
        )
