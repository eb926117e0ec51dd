"""Drafts after every step: made at once, already on the device, or skipped. Knows no method."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.proposer import (
    DraftRequest,
    DraftsAsync,
    PendingStep,
    ProposeInput,
    Proposer,
    TargetStep,
)
from fastdeploy_sd.types import (
    I32,
    DraftTokens,
    NewRequest,
    RequestId,
    SchedulerOutput,
    SpeculationInfo,
    VerifyResult,
    offsets,
)
from fastdeploy_sd.worker.step.batch import PendingRows
from fastdeploy_sd.worker.step.draft_inputs import DraftInputs
from fastdeploy_sd.worker.step.forward import StepResources
from fastdeploy_sd.worker.step.guided_rows import GuidedRows
from fastdeploy_sd.worker.step.request_table import Changes, RequestTable


class AsyncDrafting:
    """Has a method draft after in-flight steps, if it can do so.

    `is_lossy`: whether drafts decide the output. Then no drafts are made so: a step may run again on other ones.
    """

    def __init__(self, proposer: Proposer, guard: DraftGuard, table: RequestTable, *, is_lossy: bool) -> None:
        self._proposer = proposer if isinstance(proposer, DraftsAsync) and not is_lossy else None
        self._guard = guard
        self._drafter = None if self._proposer is None else self._proposer.async_drafter
        self._table = table

    @property
    def is_available(self) -> bool:
        """Whether some in-flight steps can be drafted for; constant."""
        return self._drafter is not None

    def serves(self, request_ids: tuple[RequestId, ...]) -> bool:
        """Whether an in-flight step of these requests can be drafted for."""
        if self._drafter is None or self._proposer is None:
            return False
        return self._proposer.is_async(self._table.table_rows(request_ids))

    def start(self, rows: PendingRows) -> None:
        """Start to draft after the step that was launched last. Raises Exception: it could not be started."""
        assert self._drafter is not None, "nothing drafts ahead"
        max_total = self._table.max_total.take(rows.table_rows)
        step = PendingStep(
            table_rows=rows.table_rows,
            num_computed=rows.num_computed,
            num_new=rows.num_new,
            max_output=rows.max_output,
            max_tokens=rows.max_tokens,
            max_draft_len=rows.planned_drafts,
            sure_draft_len=np.minimum(rows.planned_drafts, max_total - rows.max_tokens - 1),
            num_kv_slots=rows.num_kv_slots,
            follows=rows.follows,
        )
        self._drafter.start(step)

    def finish(
        self, request_ids: tuple[RequestId, ...], rows: PendingRows, result: VerifyResult, committed: tuple[I32, I32]
    ) -> DraftTokens:
        """Return the drafts, once the step's output is committed. On failure, its requests get no more drafts.

        `committed`: see BatchBuilder.commit_pending.
        """
        assert self._drafter is not None, "nothing drafts ahead"
        num_committed, max_draft_len = committed
        is_unfinished = np.diff(rows.cu_num_logits) == 0
        num_run = rows.num_computed + rows.num_new * is_unfinished
        num_valid = np.where(np.diff(result.cu_num_output) > 0, num_committed - 1, num_run) * rows.is_kept
        target = TargetStep(
            offsets(rows.num_new), rows.num_computed * rows.is_kept, num_valid.astype(np.int32), rows.num_kv_slots
        )
        x = ProposeInput(request_ids, rows.table_rows, self._table.tokens, num_committed, max_draft_len, target=target)
        try:
            return self._drafter.finish(x)
        except Exception:  # host and device may differ on these requests' drafts
            _log.exception("noting the drafts of %d requests failed", len(request_ids))
            kept = [request_ids[r] for r in np.flatnonzero(rows.is_kept).tolist()]
            self._guard.give_up(kept, rows.table_rows[rows.is_kept])
            return DraftTokens.none(len(request_ids))

    def restart(self) -> None:
        """Forget the started drafts."""
        if self._drafter is not None:
            self._drafter.restart()


_log = logging.getLogger(__name__)


class Drafting:
    """Has the server's method draft for the requests of each step.

    Args:
        guided: the requests with a grammar, which cuts their drafts.
        speculation: the options that requests may choose.
        is_lossy: see AsyncDrafting.
    """

    def __init__(
        self,
        proposer: Proposer,
        step: StepResources,
        guided: GuidedRows,
        speculation: SpeculationInfo,
        step_stats: StepStats,
        *,
        is_lossy: bool,
    ) -> None:
        self.step_stats, self._speculation, self._guided, self._table = step_stats, speculation, guided, step.table
        self._guard = DraftGuard(proposer)
        self._async = AsyncDrafting(proposer, self._guard, step.table, is_lossy=is_lossy)
        self._inputs = DraftInputs(step.table, step.memory, has_target=proposer.num_lookahead_slots > 0)

    @property
    def is_async(self) -> bool:
        """Whether some in-flight steps can be drafted for; constant."""
        return self._async.is_available

    def allows_pending(self, request_ids: tuple[RequestId, ...]) -> bool:
        """Whether a step of these requests can be pending while the next one is launched."""
        return not self._is_on or self._async.serves(request_ids)

    @property
    def _is_on(self) -> bool:
        """Whether the next step gets drafts."""
        return self._speculation.max_draft_tokens > 0 and self.step_stats.skip_draft_steps == 0

    def update_requests(self, plan: SchedulerOutput, changes: Changes) -> None:
        """Forget ended requests, and begin new ones, which ends skipping."""
        if len(changes.dropped):
            self._guard.forget(changes.dropped)
        if changes.added:
            self.step_stats.skip_draft_steps = 0
            row_of = {request_id: row for row, request_id in enumerate(plan.request_ids)}
            self._guard.begin([self._request(plan, row_of, *added) for added in changes.added])

    def _request(
        self, plan: SchedulerOutput, row_of: dict[RequestId, int], new: NewRequest, table_row: int
    ) -> DraftRequest:
        request, rule = new.request, self._table.rules[table_row]
        return DraftRequest(
            request_id=request.request_id,
            table_row=table_row,
            num_prompt_tokens=new.num_prompt_tokens,
            num_tokens=len(new.token_ids),
            num_draft_slots=plan.num_computed_tokens.item(row_of[request.request_id]) + new.is_draft_ahead,
            cache_salt=request.cache_salt,
            adapter_digest=request.adapter_digest,
            method=self._speculation.method_of(request.speculation),
            end_token_ids=rule.end_token_ids,
            min_tokens=rule.min_tokens,
            is_guided=bool(request.grammar),
            prediction_token_ids=request.prediction_token_ids,
        )

    def start(self, rows: PendingRows) -> bool:
        """Start to draft after the step that was launched last, if it gets drafts; returns whether it does."""
        rows.has_drafts = self._is_on
        if rows.has_drafts:
            self._async.start(rows)
        return rows.has_drafts

    def finish(
        self,
        request_ids: tuple[RequestId, ...],
        rows: PendingRows | None,
        result: VerifyResult,
        committed: tuple[I32, I32] | None,
    ) -> DraftTokens:
        """Return the drafts after a step whose output is committed.

        Args:
            rows, committed: of a pending step, see BatchBuilder.commit; None = the step is in the step memory.
        """
        if rows is None or committed is None:
            return self._propose(request_ids)
        if rows.has_drafts:
            return self._async.finish(request_ids, rows, result, committed)
        return self._skip(request_ids)

    def restart(self) -> None:
        """Forget the drafts that were started on the device."""
        self._async.restart()

    def close(self) -> None:
        """Let the drafting method save its state for a later server."""
        self._guard.close()

    def _propose(self, request_ids: tuple[RequestId, ...]) -> DraftTokens:
        if self._speculation.max_draft_tokens == 0:  # so no method has a state to update
            return DraftTokens.none(len(request_ids))
        if self.step_stats.skip_draft_steps > 0:
            return self._skip(request_ids)
        try:
            x = self._inputs.build(request_ids)
        except Exception:
            _log.exception("preparing to draft for %d requests failed", len(request_ids))
            self._guard.give_up(request_ids, self._table.table_rows(request_ids))
            return DraftTokens.none(len(request_ids))
        return self._guided.cut(self._guard.propose(x), x.table_rows)

    def _skip(self, request_ids: Sequence[RequestId]) -> DraftTokens:
        """Draft nothing; a new request has ended skipping."""
        if self.step_stats.skip_draft_steps > 0:
            self.step_stats.skip_draft_steps -= 1
            self.step_stats.num_skipped_steps += 1
        return DraftTokens.none(len(request_ids))
