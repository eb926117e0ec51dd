"""Which request runs how many tokens in the next step. Knows no executor and no text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.admission import AdmissionRules
from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.roster import Roster
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.engine.step_plan import StepPlan
from fastdeploy_sd.errors import BadRequest
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
    running requests of strictly lower priority, but only for want of blocks, never for want of a seat or of budget.
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
            BadRequest: its id is in use, or it could never run with this cache or this step budget.
            Overloaded: the queue is full. An empty queue takes any request.
        """
        name = request.request_id
        if name in self._roster.states:
            raise BadRequest(f"request_id: expected one not in use, got {name!r}", param="request_id")
        waiting = self._roster.waiting
        self._rules.check_feasible(request)
        self._rules.check_queue(len(waiting), waiting.num_prompt_tokens, len(request.prompt_token_ids))
        key = (request.priority if self._order_by_priority else 0, self._num_arrived)
        self._num_arrived += 1
        self._roster.enter(RequestState(request, key, time.time(), self._speculation))

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """End requests wherever they are; returns their last outputs. Unknown (or ended) ids are ignored."""
        now = time.time()
        outputs = []
        for request_id in request_ids:
            state = self._roster.states.get(request_id)
            if state is not None:
                metrics = self._roster.close(state, FinishReason.ABORT, now)
                outputs.append(replace(state.empty_output(), finish_reason=FinishReason.ABORT, metrics=metrics))
        self._roster.sweep()
        return outputs

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._roster.states)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. With no request to run the plan has no rows, and must not be executed."""
        plan = StepPlan(self._max_num_batched_tokens)
        self._plan_running(plan)
        self._plan_waiting(plan)
        max_draft_lens = plan.max_draft_lens(self._speculation.max_draft_tokens)
        if not plan.states:
            assert not plan.preempted, "requests were preempted in favour of none"
            return plan.build(self._step_id, max_draft_lens, ())
        self._reserve_lookahead(plan, max_draft_lens)
        self._step_id += 1
        return plan.build(self._step_id, max_draft_lens, self._roster.take_finished_ids())

    def commit(self, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """Apply the result of an executed plan; see `commit_result`."""
        return commit_result(self._roster, plan, result)

    def stats(self) -> EngineStats:
        """Counters, histograms and gauges of this moment."""
        return self._roster.snapshot()

    def check_integrity(self) -> None:
        """Verify the books between two steps; see `Roster.check_integrity`."""
        self._roster.check_integrity()

    def _plan_running(self, plan: StepPlan) -> None:
        running = self._roster.running
        rows_short_of_slots = []
        row = 0
        while row < len(running) and plan.budget > 0:
            state = running[row]
            num_uncomputed = state.num_tokens - state.num_computed_tokens
            num_new = min(num_uncomputed, plan.budget, self._max_chunk_tokens)
            num_tokens = state.num_computed_tokens + num_new
            if num_tokens > state.table.num_slots and not self._make_room(state, num_tokens, plan):
                break  # it was the last one, and preempted itself
            num_draft = 0
            if state.num_drafts and num_new == num_uncomputed:
                num_draft = min(state.num_drafts, plan.budget - num_new)
                if num_tokens + num_draft > state.table.num_slots:
                    rows_short_of_slots.append(row)
            plan.add(state, num_new + num_draft, num_draft)
            row += 1
        # Only now that every row has blocks for its own tokens, as drafts must not make anyone be preempted.
        for row in rows_short_of_slots:
            self._fit_drafts(plan, row)

    def _make_room(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Extend a running request's blocks, preempting from the end; False if it had to preempt itself."""
        while not self._kv.extend(state.table, num_tokens):
            if self._preempt_last(plan) is state:
                return False
        return True

    def _fit_drafts(self, plan: StepPlan, row: int) -> None:
        """Give a row blocks for its drafts, and shorten these to the slots it has then."""
        state, num_draft = plan.states[row], plan.num_draft[row]
        self._kv.extend_as_far_as_possible(state.table, state.num_tokens + num_draft)
        if state.table.num_slots < state.num_tokens + num_draft:
            plan.shorten_drafts(row, state.table.num_slots - state.num_tokens)

    def _reserve_lookahead(self, plan: StepPlan, max_draft_lens: I32) -> None:
        """Give rows that will be drafted for with a model the slots this writes, while there are blocks.

        With c computed tokens and n new ones the newest token may come to position c + n, and d drafts write:

            [0 ....... c) [c ....... c+n) [c+n ........ c+n+d)      and never the slot of the request's last token
               computed      this step        look-ahead

        A row that gets none is drafted for as far as its slots go. Comes last, so that nobody is preempted or kept
        waiting in this step for it.
        """
        if self._speculation.num_lookahead_slots == 0:
            return
        for state, num_new, max_draft_len in zip(plan.states, plan.num_new, max_draft_lens.tolist(), strict=True):
            num_slots = state.num_computed_tokens + num_new + state.num_lookahead_slots
            if num_slots > state.table.num_slots:
                num_spared = max(state.num_lookahead_slots - max_draft_len, 0)
                num_slots = min(num_slots - num_spared, state.max_total_tokens - 1)
                self._kv.extend_as_far_as_possible(state.table, num_slots)

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
        while not self._roster.admit(state, match):
            running = self._roster.running
            if not running or running[-1].key[0] <= state.key[0]:
                return False
            self._preempt_last(plan)
        plan.add(state, min(num_new, plan.budget, self._max_chunk_tokens))
        return True

    def _preempt_last(self, plan: StepPlan) -> RequestState:
        """Preempt the running request with the highest key and take its row out of the plan."""
        victim = self._roster.preempt_last()
        plan.remove(victim)
        plan.preempted.append(victim)
        return victim
