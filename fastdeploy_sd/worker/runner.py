"""ModelRunner: one step of the model, from plan to result. Knows no scheduling, no stop rules and no HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from paddle import Tensor

from fastdeploy_sd.sampling.verify import Verifier, VerifyRule
from fastdeploy_sd.spec_decode.proposer import DraftRequest, Proposer
from fastdeploy_sd.types import (
    F32,
    I32,
    Batch,
    DraftTokens,
    RequestId,
    SchedulerOutput,
    SpeculationInfo,
    StepResult,
    VerifyResult,
)
from fastdeploy_sd.worker.batch import BatchBuilder
from fastdeploy_sd.worker.draft_inputs import DraftInputs
from fastdeploy_sd.worker.forward import Forward
from fastdeploy_sd.worker.membership import Membership
from fastdeploy_sd.worker.request_state import RequestTable

_NOBODY: Mapping[RequestId, str] = {}
_NOT_FINITE = "the model produced non-finite logits for this request"


class ModelRunner:
    """Owns the request table, and runs the decoder over its requests' KV.

    Args:
        forward: runs the decoder over its KV caches.
        speculation: what requests may ask for.
        rule: how drafts are judged.
    """

    def __init__(
        self,
        forward: Forward,
        block_size: int,
        table: RequestTable,
        proposer: Proposer,
        speculation: SpeculationInfo,
        rule: VerifyRule,
    ) -> None:
        self._forward, self._table, self._proposer = forward, table, proposer
        self._speculation = speculation
        self._batches, self._verifier = BatchBuilder(table, block_size), Verifier(rule)
        self._draft_inputs = DraftInputs(table, block_size, has_target=proposer.num_lookahead_slots > 0)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see Executor.execute."""
        begin = time.perf_counter()
        dropped, added = self._table.apply(plan)
        if len(dropped):
            self._proposer.forget(dropped)
        if plan.new:
            self._begin(plan, added)
        members = self._table.members(plan.request_ids)
        batch = self._batches.build(plan, members)
        built = time.perf_counter()
        hidden, logits = self._forward(batch)
        computed = time.perf_counter()
        verified, failed_rows = self._verify(batch, logits)
        judged = time.perf_counter()
        self._table.commit(members, verified)
        drafts = self._propose(plan, members, batch, verified, hidden)
        drafted = time.perf_counter()
        return StepResult(
            step_id=plan.step_id,
            request_ids=plan.request_ids,
            verified=verified,
            drafts=drafts,
            failed={plan.request_ids[r]: _NOT_FINITE for r in failed_rows} if failed_rows else _NOBODY,
            timings_ms={
                "batch": (built - begin) * 1e3,
                "forward": (computed - built) * 1e3,
                "verify": (judged - computed) * 1e3,
                "draft": (drafted - judged) * 1e3,
            },
        )

    def _verify(self, batch: Batch, logits: F32) -> tuple[VerifyResult, tuple[int, ...]]:
        if len(batch.logits_indices) == 0:
            none = np.zeros(len(batch.request_ids) + 1, np.int32)
            return VerifyResult(none[:0], none, none[1:].copy()), ()
        return self._verifier.verify(logits, batch)

    def _begin(self, plan: SchedulerOutput, slots: I32) -> None:
        row_of = {request_id: row for row, request_id in enumerate(plan.request_ids)}
        self._proposer.begin(
            [
                DraftRequest(
                    request_id=new.request.request_id,
                    slot=int(slot),
                    num_prompt_tokens=new.num_prompt_tokens,
                    num_tokens=len(new.token_ids),
                    num_computed_tokens=int(plan.num_computed_tokens[row_of[new.request.request_id]]),
                    cache_salt=new.request.cache_salt,
                    method=self._speculation.method_of(new.request.speculation),
                    end_token_ids=self._table.rules[int(slot)].end_token_ids,
                    min_tokens=self._table.rules[int(slot)].min_tokens,
                )
                for new, slot in zip(plan.new, slots, strict=True)
            ]
        )

    def _propose(
        self, plan: SchedulerOutput, members: Membership, batch: Batch, verified: VerifyResult, hidden: Tensor
    ) -> DraftTokens:
        if self._speculation.max_draft_tokens == 0:  # so no method keeps a state that this would bring up to date
            return members.no_drafts
        return self._proposer.propose(self._draft_inputs.build(plan, members, batch, verified, hidden))

    def close(self) -> None:
        """Let the drafting method save what should outlive it."""
        self._proposer.close()
