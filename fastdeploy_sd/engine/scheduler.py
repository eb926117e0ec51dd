"""Which request runs how many tokens in the next step. Knows no executor and no text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from operator import add, gt, sub

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.admission import AdmissionRules
from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.roster import Roster
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.engine.step_plan import StepPlan
from fastdeploy_sd.errors import BadRequest, shown
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
    itself): that one loses its blocks and drafts and goes back to the queue by its key, to be recomputed; it is not
    admitted again in the same step. Under the 'priority' policy the head of the queue also preempts, in the same way,
    running requests of strictly lower priority, but only for want of blocks, never for want of a seat or of budget, and
    only if all of them together hold enough.
    Neither drafts nor the slots that drafting writes ahead preempt anyone: they get blocks when the rows have theirs.
    A row keeps these blocks, those of rejected drafts too, as its next tokens go there; so in a later step another row
    may find none left, and preempt, sooner than it would without speculation.

    Chunks. A request runs at most `long_prefill_token_threshold` of its own tokens in a step, if there is a threshold,
    so that a long prompt leaves room for other prompts. Without chunked prefill a request waits until the rest of the
    budget holds all its tokens; only one that outgrew the whole budget while it ran and was then preempted is chunked
    all the same.

    Source: the single num_computed_tokens rule is vLLM v1's (vllm/v1/core/sched/scheduler.py).
    """

    def __init__(self, config: Config, model_info: ModelInfo) -> None:
        """Make a scheduler without requests.

        Args:
            config: limits; its cache size is not read, as `model_info` says what was really allocated.
        """
        limits = config.scheduler
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._max_chunk_tokens = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        self._enable_chunked_prefill = limits.enable_chunked_prefill
        self._order_by_priority = limits.policy == "priority"
        self._rules = AdmissionRules(limits, model_info)
        self._speculation = model_info.speculation
        num_drafts = self._speculation.max_draft_tokens
        # An equal share of the budget for every seat, or speculating requests would keep the others from running.
        assert num_drafts == 0 or (num_drafts + 1) * limits.max_num_seqs <= limits.max_num_batched_tokens, (
            f"{limits.max_num_seqs} requests with {num_drafts} drafts each do not fit into a step of "
            f"{limits.max_num_batched_tokens} tokens"
        )
        self._kv = KVCacheManager(
            model_info.num_blocks, model_info.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
        )
        self._roster = Roster(self._kv, limits.max_num_seqs, self._speculation)
        self._num_arrived = 0
        self._step_id = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequest: its id is in use, a column of it breaks its rule, or it could never run with this cache or this
                step budget.
            Overloaded: the queue is full. An empty queue takes any request.
        """
        name = request.request_id
        if name in self._roster.states:
            raise BadRequest(f"request_id: expected one not in use, got {shown(name)}", param="request_id")
        waiting = self._roster.waiting
        self._rules.verify(request)
        self._rules.check_queue(len(waiting), waiting.num_prompt_tokens, len(request.prompt_token_ids))
        key = (request.priority if self._order_by_priority else 0, self._num_arrived)
        self._num_arrived += 1
        self._roster.enter(RequestState(request, key, time.time(), self._speculation, self._roster.columns))

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason) -> list[RequestOutput]:
        """End requests wherever they are; returns their last outputs. Unknown (or ended) ids are ignored."""
        now = time.time()
        outputs = []
        for request_id in request_ids:
            state = self._roster.states.get(request_id)
            if state is not None:
                metrics = self._roster.close(state, reason, now)
                outputs.append(replace(state.empty_output(), finish_reason=reason, metrics=metrics))
        self._roster.sweep()
        return outputs

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._roster.states)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. With no request to run the plan has no rows, and must not be executed."""
        plan, roster = self._plan_running(), self._roster
        self._plan_waiting(plan)
        finished_ids: tuple[RequestId, ...] = ()
        if plan.states:
            self._step_id += 1
            finished_ids = roster.take_finished_ids()
        else:
            assert not plan.preempted, "requests were preempted in favour of none"
        num_new = np.array(plan.num_new, np.int32)
        draft = roster.drafts.collect(plan.rows, plan.num_draft)
        max_draft_len = np.zeros(len(plan.states), np.int32)
        if self._speculation.max_draft_tokens:
            max_draft_len = plan.max_draft_len(roster.columns)
            self._reserve_lookahead(plan, max_draft_len)
        new, deltas = roster.take_block_changes()
        ids = roster.running_ids if plan.states == roster.running else tuple([s.request_id for s in plan.states])
        return SchedulerOutput(
            step_id=self._step_id,
            request_ids=ids,
            new=new,
            deltas=deltas,
            num_computed_tokens=roster.columns.num_computed_tokens.take(plan.rows),
            num_new_tokens=num_new,
            draft=draft,
            max_draft_len=max_draft_len,
            finished_ids=finished_ids,
            preempted_ids=tuple([state.request_id for state in plan.preempted]),
        )

    def commit(self, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """Apply the result of an executed plan; see `commit_result`."""
        return commit_result(self._roster, plan, result)

    def stats(self) -> EngineStats:
        """Counters, histograms and gauges of this moment."""
        return self._roster.snapshot()

    def check_integrity(self) -> None:
        """Verify the books between two steps; see `Roster.check_integrity`."""
        self._roster.check_integrity()

    def _plan_running(self) -> StepPlan:
        """Plan the running requests in their order, as far as budget and blocks go."""
        roster = self._roster
        rows = roster.running_rows
        num_tokens, num_computed, num_slots, num_draft = roster.columns.read(rows)
        num_own = list(map(sub, num_tokens, num_computed))
        if max(num_own, default=0) > self._max_chunk_tokens:
            num_own = [min(count, self._max_chunk_tokens) for count in num_own]
        num_new = list(map(add, num_own, num_draft))  # drafts are only behind the last token of a request
        plan = StepPlan(self._max_num_batched_tokens, list(roster.running), rows, num_new, num_draft)
        if plan.budget < 0:
            plan.cut_to_budget()
        if any(map(gt, map(add, num_computed, plan.num_new), num_slots)):  # the budget may have cut the last rows off
            self._make_room(plan)
            # Only now that every row has blocks for its own tokens, as drafts must not make anyone be preempted.
            self._fit_drafts(plan)
        return plan

    def _make_room(self, plan: StepPlan) -> None:
        """Extend the rows' blocks over their own tokens, preempting from the end; it may hit the row itself."""
        c = self._roster.columns
        num_own = np.array(plan.num_new, np.int32) - np.array(plan.num_draft, np.int32)
        ends = c.num_computed_tokens.take(plan.rows) + num_own
        for row in np.flatnonzero(ends > c.num_slots.take(plan.rows)).tolist():
            if row >= len(plan.states):
                return  # preempted for a row before it
            state = plan.states[row]
            while not self._roster.extend(state, int(ends[row])):
                if self._preempt_last(plan) is state:
                    return

    def _fit_drafts(self, plan: StepPlan) -> None:
        """Give the rows blocks for their drafts while there are any, and shorten these to the slots there are then."""
        c = self._roster.columns
        ends = c.num_computed_tokens.take(plan.rows) + np.array(plan.num_new, np.int32)
        for row in np.flatnonzero(ends > c.num_slots.take(plan.rows)).tolist():
            num_short = int(ends[row]) - self._roster.extend_as_far_as_possible(plan.states[row], int(ends[row]))
            if num_short > 0:
                plan.shorten_drafts(row, plan.num_draft[row] - num_short)

    def _reserve_lookahead(self, plan: StepPlan, max_draft_len: I32) -> None:
        """Give rows that will be drafted for with a model the slots this writes, while there are blocks.

        With c computed tokens and n new ones the newest token may come to position c + n, and d drafts write:

            [0 ....... c) [c ....... c+n) [c+n ........ c+n+d)      and never the slot of the request's last token
               computed      this step        look-ahead

        A row that gets none is drafted for as far as its slots go. Comes last, so that nobody is preempted or kept
        waiting in this step for it.
        """
        if self._speculation.num_lookahead_slots == 0:
            return
        c, rows = self._roster.columns, plan.rows
        num_lookahead = c.num_lookahead_slots.take(rows)
        ends = c.num_computed_tokens.take(rows) + np.array(plan.num_new, np.int32) + num_lookahead
        num_spared = np.maximum(num_lookahead - max_draft_len, 0)
        num_useful = np.minimum(ends - num_spared, c.max_total_tokens.take(rows) - 1)
        for row in np.flatnonzero(ends > c.num_slots.take(rows)).tolist():
            self._roster.extend_as_far_as_possible(plan.states[row], int(num_useful[row]))

    def _plan_waiting(self, plan: StepPlan) -> None:
        while plan.budget > 0 and self._roster.has_seat:
            state = self._roster.waiting.peek()
            if state is None or state in plan.preempted or not self._admit(state, plan):
                break

    def _admit(self, state: RequestState, plan: StepPlan) -> bool:
        """Move the head of the queue to the running requests, if budget and blocks allow."""
        if self._kv.is_still_refused(state.table):
            return False  # nor has anyone come to run since whom it may preempt, as nobody overtakes it
        match = self._kv.match_prefix(state.table, state.token_ids, state.num_tokens)
        num_new = state.num_tokens - match.num_tokens
        fits_whole_budget = num_new <= self._max_num_batched_tokens
        if num_new > plan.budget and fits_whole_budget and not self._enable_chunked_prefill:
            return False
        if not self._roster.admit(state, match):
            lower = [running.table for running in self._roster.running if running.key[0] > state.key[0]]
            if not lower or not self._kv.fits_without(lower, match, state.num_tokens):
                return False
            while not self._roster.admit(state, match):
                self._preempt_last(plan)
        plan.add(state, min(num_new, plan.budget, self._max_chunk_tokens))
        return True

    def _preempt_last(self, plan: StepPlan) -> RequestState:
        """Preempt the running request with the highest key and take its row out of the plan."""
        victim = self._roster.preempt_last()
        plan.remove(victim)
        plan.preempted.append(victim)
        return victim
