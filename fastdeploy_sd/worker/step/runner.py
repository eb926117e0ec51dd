"""ModelRunner: one step of the model, from plan to result. Knows no scheduling, no stop rules and no HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fastdeploy_sd.device.device_buffers import HOST_BUFFERS, DeviceBuffers
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.bisection import run_in_parts
from fastdeploy_sd.spec_decode.control.step_stats import StepStats
from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.proposer import DraftRequest, Proposer
from fastdeploy_sd.spec_decode.verify import Verifier, VerifyRule
from fastdeploy_sd.types import (
    EMPTY_I32,
    I32,
    DraftTokens,
    NewRequest,
    RequestId,
    Rows,
    SchedulerOutput,
    SpeculationInfo,
    StepResult,
    VerifyResult,
    offsets,
)
from fastdeploy_sd.worker.ranks.commands import RunRows, TakeOutput
from fastdeploy_sd.worker.ranks.coordinator import RankCoordinator, SingleRank
from fastdeploy_sd.worker.step.async_drafting import AsyncDrafting
from fastdeploy_sd.worker.step.batch import BatchBuilder, PendingRows
from fastdeploy_sd.worker.step.draft_inputs import DraftInputs
from fastdeploy_sd.worker.step.forward import Forward
from fastdeploy_sd.worker.step.guided_rows import GuidedRows
from fastdeploy_sd.worker.step.launched_step import LaunchedStep
from fastdeploy_sd.worker.step.layer_signals import LayerSignals
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.step_rows import described, merge_results

_log = logging.getLogger(__name__)

_NOBODY: Mapping[RequestId, tuple[str, str]] = {}
_NO_OUTPUT = VerifyResult(EMPTY_I32, offsets([]), EMPTY_I32)
_NOT_FINITE = InternalError.__name__, "the model produced non-finite logits for this request"


class ModelRunner:
    """Owns the request table, and runs the decoder over its requests' KV.

    Args:
        forward: runs the decoder over its KV caches.
        memory: of the steps; what they hand on are views of it.
        speculation: what requests may ask for.
        rule: how drafts are verified.
        board: what the proposer is told of steps, and what it tells.
        guided: the requests with a grammar.
        ranks: coordinates the other ranks, if there are any. signals: of the forward pass, None = it gives none.
        buffers: of the memory and the table, where the model is on a device.
    """

    def __init__(  # noqa: PLR0913 (what a step goes through)
        self,
        *,
        forward: Forward,
        memory: StepMemory,
        table: RequestTable,
        proposer: Proposer,
        speculation: SpeculationInfo,
        rule: VerifyRule,
        step_stats: StepStats,
        guided: GuidedRows,
        ranks: RankCoordinator | None = None,
        signals: LayerSignals | None = None,
        buffers: DeviceBuffers = HOST_BUFFERS,
    ) -> None:
        self._forward, self._table, self._proposer = forward, table, DraftGuard(proposer)
        self._logits = forward.logits
        self._speculation, self._ranks, self._signals = speculation, ranks or SingleRank(), signals
        self._step_stats, self._memory, self._guided = step_stats, memory, guided
        self._ended = time.perf_counter()
        self._batches = BatchBuilder(table, memory, buffers)
        self._verifier = Verifier(rule, memory, table.sampling(memory), forward.logits, buffers)
        self._ahead = AsyncDrafting(proposer, self._proposer, table, is_lossy=rule.is_lossy)
        self._draft_inputs = DraftInputs(table, memory, has_target=proposer.num_lookahead_slots > 0)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see Executor.execute.

        A row that the table refuses, or on which the step fails, fails its request. Which rows these are is found by
        running the step without them: nothing of a request has changed before its output is appended, and KV is written
        again where it was. The others get what they would get anyway, as no row depends on those beside it.
        """
        refused, _ = self.update_requests(plan)
        if not plan.request_ids:
            return StepResult(plan.step_id, (), _NO_OUTPUT, DraftTokens.none(0))
        if not refused:
            try:
                return self._run(plan)
            except Exception:
                _log.exception("a step of %d requests failed; trying them apart", len(plan.request_ids))
        return self.run_apart(plan, refused)

    def run_apart(self, plan: SchedulerOutput, refused: Mapping[RequestId, Exception]) -> StepResult:
        """Run the rows that the table has taken, in as few parts as do not fail."""
        if self._signals is not None:
            self._signals.stop()
        rows = np.array([r for r, request_id in enumerate(plan.request_ids) if request_id not in refused], np.intp)
        failed, results = dict(refused), []
        for part in run_in_parts(lambda b, e: self._run_rows(plan, rows[b:e]).kept(), 0, len(rows)):
            if part.result is not None:
                results.append((rows[part.begin : part.end], part.result))
            elif part.error is not None:
                failed[plan.request_ids[rows[part.begin]]] = part.error
        for request_id, error in failed.items():
            _log.error("request %s failed: %r", request_id, error)
        return merge_results(plan, results, {request_id: described(error) for request_id, error in failed.items()})

    def _run_rows(self, plan: SchedulerOutput, rows: Rows) -> StepResult:
        return self._run(plan.take(rows), rows.astype(np.int32))

    def _run(self, plan: SchedulerOutput, rows: I32 | None = None) -> StepResult:
        """Run a plan whose requests the table has; raises before any of them has changed, or not at all.

        Args:
            rows: which these are of the plan that was taken in; None = all.
        """
        with self._ranks.attempt(lambda number: RunRows(number, rows)):
            step = self.launch(plan)
            step.wait_begin = step.launched
            found = self._wait(step)
        return self._complete(step, *found)

    def launch(
        self, plan: SchedulerOutput, before: PendingRows | None = None, *, is_open: bool = False
    ) -> LaunchedStep:
        """Run a plan up to its tokens, or have a device start to.

        Args:
            before: see BatchBuilder.build.
            is_open: whether another step may be launched before `finish`.
        """
        begin = time.perf_counter()
        self._batches.build(plan, before)
        built = time.perf_counter()
        with self._guided.masks():
            self._forward()
        computed = time.perf_counter()
        output = self._verifier.start()
        rows = self._batches.open(before) if is_open else None
        if rows is not None and self._drafts:
            self._ahead.start(rows)
            rows.has_drafts = True
            output.extend()
        m = self._memory
        sizes = m.num_tokens, m.num_requests, m.num_logits
        return LaunchedStep(plan, output, rows, *sizes, begin, built, computed, time.perf_counter())

    @property
    def drafts_async(self) -> bool:
        """See engine.executor.Launcher."""
        return self._ahead.is_available

    def may_open(self, plan: SchedulerOutput) -> bool:
        """Whether a step can be open; its requests were taken in."""
        return not self._drafts or self._ahead.serves(plan.request_ids)

    @property
    def _drafts(self) -> bool:
        """Whether drafts are made behind a step."""
        return self._speculation.max_draft_tokens > 0 and self._step_stats.skip_draft_steps == 0

    def restart(self) -> None:
        """Have the device know what the host does: what was launched has run on other tokens, or not at all."""
        self._table.send_all()
        self._ahead.restart()

    def finish(self, step: LaunchedStep) -> StepResult:
        """Take the tokens of a step that was launched, and draft behind them. Raises as `_run`."""
        step.wait_begin = time.perf_counter()
        return self._complete(step, *self._wait(step))

    def _wait(self, step: LaunchedStep) -> tuple[VerifyResult, tuple[int, ...]]:
        at: StepMemory | PendingRows = step.rows or self._memory
        has_reports = step.rows is None and self._table.num_reports > 0
        return self._verifier.finish(step.output, at.num_requests, at.cu_num_logits, has_reports=has_reports)

    def _complete(self, step: LaunchedStep, result: VerifyResult, failed_rows: tuple[int, ...]) -> StepResult:
        plan, verified = step.plan, time.perf_counter()
        failures = {
            plan.request_ids[r]: self._guided.failure(r, self._logits) or _NOT_FINITE
            for r in failed_rows
            if not self._guided.is_late(r)
        }
        committed = None
        if step.rows is None:
            self._batches.commit()
        else:
            committed = self._batches.commit_pending(step.rows, result)
        self._guided.advance(result)
        self._ranks.post(TakeOutput(result.token_ids, result.cu_num_output))
        self._step_stats.num_prompt_tokens_ahead = plan.num_prompt_tokens_ahead
        begin = max(step.begin, self._ended)  # one that began before the step before it was over ran behind that one
        self._tell_step_stats(step, verified - begin, begin - self._ended)
        if step.rows is None or committed is None:
            drafts = self._propose(plan.request_ids)
        elif step.rows.has_drafts:
            drafts = self._ahead.finish(plan.request_ids, step.rows, result, committed)
        else:
            drafts = self._rest(plan.request_ids)
        drafted = self._ended = time.perf_counter()
        return StepResult(
            step_id=plan.step_id,
            request_ids=plan.request_ids,
            verified=result,
            drafts=drafts,
            failed=failures or _NOBODY,
            timings_ms=step.timings_ms(verified, drafted),
            choice=self._step_stats.report,
            skip_draft_steps=self._step_stats.skip_draft_steps,
            held=self._guided.held(plan.request_ids),
        )

    def _tell_step_stats(self, step: LaunchedStep, seconds: float, host_seconds: float) -> None:
        b = self._step_stats
        b.num_tokens, b.num_requests = step.num_tokens, step.num_requests
        b.seconds, b.host_seconds = seconds, host_seconds
        # Every row of logits is a request's newest token or a draft; what has none is a part of a prompt.
        b.num_prompt_tokens = step.num_tokens - step.num_logits

    def update_requests(self, plan: SchedulerOutput) -> tuple[Mapping[RequestId, Exception], I32]:
        """Let the table and the drafting method know who came and went.

        Returns:
            Whom the table refused, and the table rows i32[n] that were given up.
        """
        unmatched = self._guided.admit(plan.new)
        taken = plan
        if unmatched:
            taken = replace(plan, new=tuple(new for new in plan.new if new.request.request_id not in unmatched))
        changes = self._table.apply(taken)
        refused = {**unmatched, **changes.refused}
        self._ranks.take_plan(plan, tuple(refused))
        self._guided.update(changes.dropped, changes.added)
        if len(changes.dropped):
            self._proposer.forget(changes.dropped)
        if changes.added:
            self._step_stats.skip_draft_steps = 0
            self._begin(plan, changes.added)
        return refused, changes.dropped

    def _begin(self, plan: SchedulerOutput, added: Sequence[tuple[NewRequest, int]]) -> None:
        row_of = {request_id: row for row, request_id in enumerate(plan.request_ids)}
        self._proposer.begin(
            [
                DraftRequest(
                    request_id=new.request.request_id,
                    table_row=table_row,
                    num_prompt_tokens=new.num_prompt_tokens,
                    num_tokens=len(new.token_ids),
                    num_draft_slots=plan.num_computed_tokens.item(row_of[new.request.request_id]) + new.is_draft_ahead,
                    cache_salt=new.request.cache_salt,
                    method=self._speculation.method_of(new.request.speculation),
                    end_token_ids=self._table.rules[table_row].end_token_ids,
                    min_tokens=self._table.rules[table_row].min_tokens,
                    is_guided=bool(new.request.grammar),
                    prediction_token_ids=new.request.prediction_token_ids,
                )
                for new, table_row in added
            ]
        )

    def _propose(self, request_ids: tuple[RequestId, ...]) -> DraftTokens:
        if self._speculation.max_draft_tokens == 0:  # so no method keeps a state that this would bring up to date
            return DraftTokens.none(len(request_ids))
        if self._step_stats.skip_draft_steps > 0:
            return self._rest(request_ids)
        try:
            x = self._draft_inputs.build(request_ids)
        except Exception:
            _log.exception("preparing to draft for %d requests failed", len(request_ids))
            self._proposer.give_up(request_ids, self._table.table_rows(request_ids))
            return DraftTokens.none(len(request_ids))
        return self._guided.cut(self._proposer.propose(x), x.table_rows)

    def _rest(self, request_ids: tuple[RequestId, ...]) -> DraftTokens:
        """Draft nothing; a request that began since has ended the rest."""
        if self._step_stats.skip_draft_steps > 0:
            self._step_stats.skip_draft_steps -= 1
            self._step_stats.num_skipped_steps += 1
        return DraftTokens.none(len(request_ids))

    def close(self) -> None:
        """End the thread of grammars, and let the drafting method save what should outlive it."""
        self._guided.close()
        self._proposer.close()
