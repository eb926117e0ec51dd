"""Which request runs how many tokens in the next step, and what a step's result does to each of them.

Owns the waiting and the running requests. Knows no executor, no text and no clock but wall time for metrics.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.admission import AdmissionRules
from fastdeploy_sd.engine.logprobs import slice_logprobs
from fastdeploy_sd.engine.request_state import RequestState, RequestStatus
from fastdeploy_sd.engine.result_check import check_result
from fastdeploy_sd.engine.stats import EngineStats, StatsRecorder
from fastdeploy_sd.engine.step_plan import StepPlan
from fastdeploy_sd.engine.stopping import find_stop
from fastdeploy_sd.engine.waiting_queue import WaitingQueue
from fastdeploy_sd.errors import BadRequest, InternalError
from fastdeploy_sd.kvcache.manager import KVCacheManager
from fastdeploy_sd.types import (
    I32,
    FinishReason,
    ModelInfo,
    Request,
    RequestId,
    RequestOutput,
    SchedulerOutput,
    StepResult,
    VerifyResult,
)


class Scheduler:
    """One rule: each step lets a request's computed tokens catch up with its tokens, within the token budget.

    There is no prefill phase and no decode phase. A request has `num_tokens` committed tokens, drafts after them, and
    `num_computed_tokens` of KV; a chunk of a prompt, a prefix hit, recomputation after preemption, plain decoding and
    verification of drafts are all the distance between the two.

    Order. Every request has a key: the order of arrival, under the 'priority' policy after its priority. Running
    requests are served before waiting ones; each group goes by key. The head of the queue is never overtaken.

    Blocks. A request is admitted when there are blocks for all its tokens, so that a prompt cannot stall half-way. A
    running request that needs a block when none is left preempts the running request with the highest key (perhaps
    itself): that one loses its blocks and drafts and goes back to the queue by its key, to be recomputed. Under the
    'priority' policy the head of the queue also preempts, in the same way, running requests of strictly lower
    priority, but only for want of blocks, never for want of a seat or of budget. Drafts never preempt.

    Chunks. Without chunked prefill a request waits until the rest of the budget holds all its tokens; only one that
    outgrew the whole budget while it ran and was then preempted is chunked all the same.
    """

    def __init__(self, config: Config, model_info: ModelInfo) -> None:
        """Make an empty scheduler.

        Args:
            config: limits; its cache size is not read, as `model_info` says what was really allocated.
        """
        self._config = config.scheduler
        self._rules = AdmissionRules(config.scheduler, model_info)
        self._order_by_priority = config.scheduler.policy == "priority"
        # An equal share of the budget for every seat, or speculating requests would keep the others from running.
        share = config.scheduler.max_num_batched_tokens // config.scheduler.max_num_seqs
        self._max_draft_tokens = max(0, min(config.speculative.num_speculative_tokens, share - 1))
        self._kv = KVCacheManager(
            model_info.num_blocks, model_info.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
        )
        self._stats = StatsRecorder()
        self._states: dict[RequestId, RequestState] = {}
        self._waiting = WaitingQueue()
        self._running: list[RequestState] = []  # by key
        self._finished_ids: list[RequestId] = []  # the executor still has to drop them
        self._num_arrived = 0
        self._step_id = 0

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequest: its id is in use, or it could never run with this cache or this step budget.
            Overloaded: the queue is full. An empty queue takes any request.
        """
        if request.request_id in self._states:
            raise BadRequest(f"request_id: expected one not in use, got {request.request_id!r}", param="request_id")
        self._rules.check_feasible(request)
        self._rules.check_queue(len(self._waiting), self._waiting.num_prompt_tokens, len(request.prompt_token_ids))
        key = (request.priority if self._order_by_priority else 0, self._num_arrived)
        self._num_arrived += 1
        state = RequestState(request, key, time.time())
        self._states[request.request_id] = state
        self._waiting.push(state)
        self._stats.num_requests += 1

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """End requests wherever they are; returns their last outputs. Unknown (or ended) ids are ignored."""
        now = time.time()
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None:
                continue
            if state.status is RequestStatus.WAITING:
                self._waiting.remove(state)
            else:
                self._running.remove(state)
            self._close(state, FinishReason.ABORT, now)
            outputs.append(state.last_output(FinishReason.ABORT, now))
        return outputs

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._states)

    # ---- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. With no request to run the plan has no rows, and must not be executed."""
        plan = StepPlan(self._config.max_num_batched_tokens)
        self._plan_running(plan)
        if not plan.preempted:  # otherwise blocks are short, and the queue would take those just set free
            self._plan_waiting(plan)
        finished_ids = tuple(self._finished_ids) if plan.states else ()
        if plan.states:
            self._finished_ids.clear()
            self._step_id += 1
        assert plan.states or not plan.preempted, "requests were preempted in favour of none"
        return plan.build(self._step_id, self._max_draft_tokens, finished_ids)

    def _plan_running(self, plan: StepPlan) -> None:
        running = self._running
        row = 0
        while row < len(running) and plan.budget > 0:
            state = running[row]
            num_uncomputed = state.num_tokens - state.num_computed_tokens
            num_new = min(num_uncomputed, plan.budget)
            if not self._make_room(state, state.num_computed_tokens + num_new, plan):
                break  # it was the last one, and preempted itself
            num_draft = 0
            if state.drafts and num_new == num_uncomputed:
                num_draft = self._fit_drafts(state, plan.budget - num_new)
            plan.add(state, num_new + num_draft, num_draft)
            row += 1

    def _make_room(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Extend a running request's blocks, preempting from the end; False if it had to preempt itself."""
        while not self._kv.extend(state.table, num_tokens):
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is state:
                return False
        return True

    def _fit_drafts(self, state: RequestState, budget: int) -> int:
        """How many of the drafts the budget and the blocks allow."""
        num_draft = min(len(state.drafts), budget)
        if self._kv.extend(state.table, state.num_tokens + num_draft):
            return num_draft
        return min(num_draft, state.table.num_slots - state.num_tokens)

    def _plan_waiting(self, plan: StepPlan) -> None:
        while plan.budget > 0 and len(self._running) < self._config.max_num_seqs:
            state = self._waiting.peek()
            if state is None or state in plan.preempted or not self._admit(state, plan):
                break

    def _admit(self, state: RequestState, plan: StepPlan) -> bool:
        """Move the head of the queue to the running requests, if budget and blocks allow."""
        match = self._kv.match_prefix(state.table, state.token_ids, state.num_tokens)
        num_new = state.num_tokens - match.num_tokens
        fits_whole_budget = num_new <= self._config.max_num_batched_tokens
        if num_new > plan.budget and fits_whole_budget and not self._config.enable_chunked_prefill:
            return False
        while not self._kv.admit(state.table, match, state.num_tokens):
            victim = self._running[-1] if self._running else None
            if victim is None or victim.key[0] <= state.key[0]:
                return False
            self._preempt(victim, plan)
        self._waiting.remove(state)
        insort(self._running, state, key=_key)
        state.status = RequestStatus.RUNNING
        state.num_computed_tokens = match.num_tokens
        if not state.first_scheduled_time:
            state.first_scheduled_time = time.time()
            state.num_cached_tokens = match.num_tokens
            self._stats.record_prefix_lookup(state.num_prompt_tokens, match.num_tokens)
        plan.add(state, min(num_new, plan.budget))
        return True

    def _preempt(self, victim: RequestState, plan: StepPlan) -> None:
        """Put the last running request back into the queue, out of this step's plan."""
        assert self._running[-1] is victim, "only the last running request is preempted"
        self._running.pop()
        plan.remove(victim)
        plan.preempted.append(victim)
        self._kv.free(victim.table)
        victim.reset_progress()
        self._waiting.push(victim)
        self._stats.num_preemptions += 1

    # ---- commit -----------------------------------------------------------------------------------------------------

    def commit(self, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """Apply a step's result: append outputs, find ends, publish full blocks, keep the next drafts.

        Returns:
            One output per request that got tokens or failed, in the plan's order.

        Raises:
            InternalError: the result does not answer the plan; the state is unusable from here on.
        """
        check_result(plan, result)
        now = time.time()
        verified, drafts = result.verified, result.drafts
        token_ids, draft_ids = verified.token_ids.tolist(), drafts.token_ids.tolist()
        cu_output, cu_draft = verified.cu_num_output.tolist(), drafts.cu_num_draft.tolist()
        num_new = plan.num_new_tokens.tolist()
        outputs: list[RequestOutput] = []
        num_emitted = np.zeros(len(num_new), np.int32)
        for row, request_id in enumerate(plan.request_ids):
            state = self._states[request_id]
            begin, end = cu_output[row], cu_output[row + 1]
            if request_id in result.failed:
                outputs.append(self._fail(state, result.failed[request_id], now))
            elif begin == end:
                state.num_computed_tokens += num_new[row]
                self._kv.publish(state.table, state.token_ids, state.num_computed_tokens)
            else:
                output = self._append(state, token_ids[begin:end], begin, verified, now)
                num_emitted[row] = len(output.token_ids)
                room = state.max_total_tokens - state.num_tokens - 1
                state.drafts = draft_ids[cu_draft[row] : min(cu_draft[row + 1], cu_draft[row] + room)]
                outputs.append(output)
        self._record_step(plan, result, num_emitted)
        if any(output.finish_reason for output in outputs):
            self._running = [state for state in self._running if state.status is RequestStatus.RUNNING]
        return outputs

    def _append(
        self, state: RequestState, token_ids: list[int], begin: int, verified: VerifyResult, now: float
    ) -> RequestOutput:
        """Commit a row's output, which starts at `begin` of the step's tokens."""
        stop = find_stop(token_ids, state.num_output_tokens, state.stop_rule)
        if stop is not None:
            del token_ids[stop.num_tokens :]
        if not state.first_token_time:
            state.first_token_time = now
            self._stats.num_prompt_tokens += state.num_prompt_tokens
        state.append(token_ids)
        # The last output has no KV yet. Accepted drafts have theirs; that of rejected ones lies past num_tokens - 1
        # and is overwritten before anyone reads it.
        state.num_computed_tokens = state.num_tokens - 1
        self._kv.publish(state.table, state.token_ids, state.num_computed_tokens)
        num_alternatives = state.request.sampling.logprobs
        logprobs = None
        if verified.logprobs is not None and num_alternatives is not None:
            logprobs = slice_logprobs(verified.logprobs, begin, token_ids, num_alternatives)
        if stop is None:
            return state.output(token_ids, logprobs)
        self._close(state, stop.reason, now)
        return state.last_output(stop.reason, now, token_ids, logprobs, stop_reason=stop.stop_reason)

    def _fail(self, state: RequestState, reason: str, now: float) -> RequestOutput:
        self._close(state, FinishReason.ERROR, now)
        return state.last_output(FinishReason.ERROR, now, error=(InternalError.__name__, reason))

    def _close(self, state: RequestState, reason: FinishReason, now: float) -> None:
        """Let go of a request's blocks and its place in the books. The caller takes it out of queue or running list."""
        if state.status is RequestStatus.RUNNING:
            self._finished_ids.append(state.request_id)
        self._kv.free(state.table, discard=reason is FinishReason.ERROR)
        state.status = RequestStatus.FINISHED
        del self._states[state.request_id]
        self._stats.record_finish(
            reason, state.metrics(now), state.num_prompt_tokens, state.num_output_tokens, state.request.max_tokens
        )

    # ---- books ------------------------------------------------------------------------------------------------------

    def _record_step(self, plan: SchedulerOutput, result: StepResult, num_emitted: I32) -> None:
        self._stats.record_step(result.timings_ms)
        self._stats.num_generated_tokens += int(num_emitted.sum())
        if plan.draft.token_ids.size:
            num_draft = np.diff(plan.draft.cu_num_draft)
            rows = (num_draft > 0) & (np.diff(result.verified.cu_num_output) > 0)
            self._stats.record_verification(
                num_draft[rows], result.verified.num_accepted[rows], int(num_emitted[rows].sum())
            )

    def stats(self) -> EngineStats:
        """Counters, histograms and gauges of this moment. O(waiting requests)."""
        return replace(
            self._stats.snapshot(),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preempted_waiting=sum(state.num_preemptions > 0 for state in self._waiting),
            num_waiting_tokens=self._waiting.num_prompt_tokens,
            max_num_seqs=self._config.max_num_seqs,
            block_size=self._kv.block_size,
            num_blocks=self._kv.num_blocks,
            num_free_blocks=self._kv.num_free_blocks,
            num_cached_blocks=self._kv.num_cached_blocks,
        )

    def check_integrity(self) -> None:
        """Verify the books between two steps. O(tokens); for tests and debug mode.

        Raises:
            AssertionError: naming the broken rule.
        """
        self._kv.check_integrity()
        running = self._running
        assert running == sorted(running, key=_key), "running requests out of order"
        assert len(running) <= self._config.max_num_seqs, f"{len(running)} requests run"
        everyone = [*running, *self._waiting]
        assert {state.request_id for state in everyone} == set(self._states), "a request is lost"
        assert len(everyone) == len(self._states), "a request runs and waits"
        for state in running:
            state.check_running()
        for state in self._waiting:
            assert not state.table.block_ids, f"{state.request_id} waits and holds blocks"


def _key(state: RequestState) -> tuple[int, int]:
    return state.key
