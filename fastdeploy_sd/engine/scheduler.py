"""Which request runs how many tokens in the next step. Knows no executor and no text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from operator import add, sub

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.admission import AdmissionRules
from fastdeploy_sd.engine.block_store import BlockStore
from fastdeploy_sd.engine.draft_share import max_num_drafts
from fastdeploy_sd.engine.grammars import Grammars
from fastdeploy_sd.engine.kv_supply import KvSupply, NoKvSupply
from fastdeploy_sd.engine.pool_stats import snapshot_of
from fastdeploy_sd.engine.request_pool import RequestPool
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.engine.step_builder import StepBuilder
from fastdeploy_sd.engine.supply_chain import SupplyChain
from fastdeploy_sd.engine.swap_space import SwapSpace
from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.kvcache.manager import KVCacheManager
from fastdeploy_sd.types import I32, ModelInfo, Request, RequestId, Rows, SchedulerOutput


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
    running requests of strictly lower priority. It does so for want of blocks alone, never for want of a seat or of
    budget, and only if all those requests together hold enough.
    Neither drafts nor the slots that drafting writes ahead preempt anyone: they get blocks when the rows have theirs.
    A row keeps these blocks, those of rejected drafts too, as its next tokens go there; so in a later step another row
    may find none left, and preempt, sooner than it would without speculation.

    Drafts. Who runs or waits for a free seat shares the step, so one alone may bring more drafts than one of many. When
    others have come, what was drafted before is cut to the share there is now: drafts keep nobody from running.

    Chunks. A request runs at most `long_prefill_token_threshold` of its own tokens in a step, if there is a threshold,
    so that a long prompt leaves room for other prompts. Without chunked prefill a request waits until the rest of the
    budget holds all its tokens; only one that outgrew the whole budget while it ran and was then preempted is chunked
    all the same.

    Readiness. A request whose grammar is being compiled stands in front of the queue, and those behind it go past. One
    for which the supply brings KV when it gets its blocks keeps seat and blocks, and is in no step until that has
    arrived; then it starts before any waiting one, and may bring drafts. Meanwhile others run past it, and it can be
    preempted like a running request.

    Source: the single num_computed_tokens rule is vLLM v1's (vllm/v1/core/sched/scheduler.py).
    """

    def __init__(
        self,
        config: Config,
        model_info: ModelInfo,
        supply: KvSupply,
        store: BlockStore | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            config: limits; its cache size is not read, as `model_info` says what was really allocated.
            supply: asked each time a request has got its blocks, for what `store` does not hold.
            store: of the second level of the prefix cache, None = there is none.
            grammars: compiles what requests bring, None = a request with a grammar is refused.
        """
        limits = config.scheduler
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._max_chunk_tokens = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        self._enable_chunked_prefill = limits.enable_chunked_prefill
        self._order_by_priority = limits.policy == "priority"
        self._drafts_for_others = config.splitwise.splitwise_role == "prefill"
        self._rules = AdmissionRules(limits, model_info)
        self._speculation = model_info.speculation
        self._limits = limits
        num_drafts, text = self._speculation.max_draft_tokens, f"a step of {limits.max_num_batched_tokens} tokens"
        assert num_drafts < limits.rows_of_request(1), f"{num_drafts} drafts do not fit into {text}"
        self._kv = KVCacheManager(
            model_info.num_blocks, model_info.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
        )
        self._swap = None if store is None else SwapSpace(self._kv, store)
        if self._swap is not None:
            supply = self._swap if isinstance(supply, NoKvSupply) else SupplyChain(self._swap, supply)
        self.supply = supply
        self.pool = RequestPool(self._kv, limits.max_num_seqs, self._speculation, supply, grammars)
        self._num_arrived = 0
        self._step_id = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequest: its id is in use, a column of it breaks its rule, its grammar is known not to be valid, or it
                could never run with this cache or this step budget.
            Overloaded: the queue is full. An empty queue takes any request.
        """
        name = request.request_id
        if name in self.pool.states:
            raise BadRequest(f"request_id: expected one not in use, got {shown(name)}", param="request_id")
        waiting, preparing = self.pool.waiting, self.pool.preparing
        self._rules.verify(request)
        num_tokens = waiting.num_prompt_tokens + preparing.num_prompt_tokens
        self._rules.verify_queue(len(waiting) + len(preparing), num_tokens, len(request.prompt_token_ids))
        is_prepared = preparing.hold(request)
        key = (request.priority if self._order_by_priority else 0, self._num_arrived)
        self._num_arrived += 1
        state = RequestState(request, key, time.time(), self._speculation, self.pool.counters)
        self.pool.enter(state, is_prepared=is_prepared)

    def schedule(self, running: tuple[list[RequestState], Rows] | None = None) -> SchedulerOutput:
        """Plan the next step, with all running requests or these (and their counters); one without rows is not run."""
        step, pool = self._begin_with_running(running), self.pool
        if self._start_ready(step):
            self._admit_waiting(step)
        finished_ids: tuple[RequestId, ...] = ()
        preempted_ids: tuple[RequestId, ...] = ()
        if step.states:
            self._step_id += 1
            finished_ids, preempted_ids = pool.take_dropped_ids()
        num_new = np.array(step.num_new, np.int32)
        draft = pool.drafts.collect(step.counter_rows, step.num_draft)
        max_draft_len, num_ahead = np.zeros(len(step.states), np.int32), 0
        if self._speculation.max_draft_tokens and pool.drafts.num_rests == 0:
            num_ahead = self._prompt_tokens_ahead(step)
            max_draft_len = step.max_draft_len(pool.counters, max_num_drafts(self._limits, pool))
        if self._speculation.num_lookahead_slots:
            self._reserve_lookahead(step, max_draft_len)
        new, deltas = pool.take_block_changes()
        ids = pool.running_ids if step.states == pool.running else tuple([s.request_id for s in step.states])
        return SchedulerOutput(
            step_id=self._step_id,
            request_ids=ids,
            new=new,
            deltas=deltas,
            num_computed_tokens=pool.counters.num_computed_tokens.take(step.counter_rows),
            num_new_tokens=num_new,
            draft=draft,
            max_draft_len=max_draft_len,
            finished_ids=finished_ids,
            preempted_ids=preempted_ids,
            num_prompt_tokens_ahead=num_ahead,
        )

    def stats(self) -> EngineStats:
        """Counters, histograms and gauges of this moment. O(requests)."""
        stats = snapshot_of(self.pool)
        return stats if self._swap is None else replace(stats, swap=self._swap.stats())

    def check_integrity(self) -> None:
        """Verify every invariant between two steps; see RequestPool."""
        self.pool.check_integrity()
        if self._swap is not None:
            self._swap.check_integrity()

    def _begin_with_running(self, running: tuple[list[RequestState], Rows] | None) -> StepBuilder:
        """Begin a step with the running requests in their order, as far as budget and blocks go."""
        pool = self.pool
        states, rows = running or (list(pool.running), pool.running_rows)
        num_tokens, num_computed, num_slots, num_draft = pool.counters.read(rows)
        num_own = list(map(sub, num_tokens, num_computed))
        if any(num_draft):
            most = max_num_drafts(self._limits, pool)
            num_draft = [min(count, most) for count in num_draft]
        if max(num_own, default=0) > self._max_chunk_tokens:
            num_own = [min(count, self._max_chunk_tokens) for count in num_own]
        num_new = list(map(add, num_own, num_draft))  # drafts are only behind the last token of a request
        step = StepBuilder(self._max_num_batched_tokens, states, rows, num_new, num_draft)
        if step.budget < 0:
            step.cut_to_budget()
        ends = list(map(add, num_computed, step.num_new))  # the budget may have cut the last rows off
        short = [row for row, (end, count) in enumerate(zip(ends, num_slots, strict=False)) if end > count]
        if short:
            self._make_room(step, short, ends)
            # Only now that every row has blocks for its own tokens, as drafts must not make anyone be preempted.
            self._fit_drafts(step, short, ends)
        return step

    def _make_room(self, step: StepBuilder, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Extend these rows' blocks to `ends` less their drafts, preempting from the end; it may hit the row itself."""
        for row in rows:
            if row >= len(step.states):
                return  # preempted for a row before it
            state, end = step.states[row], ends[row] - step.num_draft[row]
            while end > state.table.num_slots and not self.pool.extend(state, end):
                if self._preempt_last(step) is state:
                    return

    def _fit_drafts(self, step: StepBuilder, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Give these rows blocks to `ends` while there are any, and shorten their drafts to the slots they have."""
        for row in rows:
            if row >= len(step.states):
                return
            num_short = ends[row] - self.pool.extend_as_far_as_possible(step.states[row], ends[row])
            if num_short > 0:
                step.shorten_drafts(row, step.num_draft[row] - num_short)

    def _reserve_lookahead(self, step: StepBuilder, max_draft_len: I32) -> None:
        """Give rows that will be drafted for with a model the slots this writes, while there are blocks.

        With c computed tokens and n new ones the newest token may come to position c + n, and d drafts write:

            [0 ....... c) [c ....... c+n) [c+n ........ c+n+d)      and never the slot of the request's last token
               computed      this step        look-ahead

        A row that gets none is drafted for as far as its slots go. Comes last, so that nobody is preempted or kept
        waiting in this step for it.
        """
        c, rows = self.pool.counters, step.counter_rows
        num_lookahead = c.num_lookahead_slots.take(rows)
        ends = c.num_computed_tokens.take(rows) + np.array(step.num_new, np.int32) + num_lookahead
        num_spared = np.maximum(num_lookahead - max_draft_len, 0)
        num_useful = np.minimum(ends - num_spared, c.max_total_tokens.take(rows) - 1)
        for row in np.flatnonzero(ends > c.num_slots.take(rows)).tolist():
            self.pool.extend_as_far_as_possible(step.states[row], int(num_useful[row]))

    def _start_ready(self, step: StepBuilder) -> bool:
        """Start the admitted requests that are ready; False if one must wait for budget, as nobody overtakes it."""
        return not self.pool.admitted or all(self._start(state, step) for state in self.pool.ready())

    def _admit_waiting(self, step: StepBuilder) -> None:
        while step.budget > 0 and self.pool.num_free_seats > 0:
            state = self.pool.waiting.peek()
            if state is None or state in step.preempted or not self._admit(state, step):
                break

    def _admit(self, state: RequestState, step: StepBuilder) -> bool:
        """Give the head of the queue a seat and blocks, if budget and blocks allow, and start it if it is ready."""
        if self._kv.is_still_refused(state.table):
            return False  # nor has anyone come to a seat since whom it may preempt, as nobody overtakes it
        match = self._kv.match_prefix(state.table, state.token_ids, state.num_tokens)
        if not self._may_start(state.num_tokens - match.num_tokens, step):
            return False
        if not self.pool.admit(state, match):
            lower = [seated.table for seated in self.pool.seated() if seated.key[0] > state.key[0]]
            if not lower or not self._kv.fits_without(lower, match, state.num_tokens):
                return False
            while not self.pool.admit(state, match):
                self._preempt_last(step)
        token_ids = np.array(state.token_ids, np.int32)
        state.is_ready = not self.supply.begin(state.request, token_ids, match.num_tokens, state.table.block_ids)
        return not state.is_ready or self._start(state, step)

    def _start(self, state: RequestState, step: StepBuilder) -> bool:
        """Let an admitted request run from this step on, if the budget allows, with the drafts that find room."""
        num_new = state.num_tokens - state.num_computed_tokens
        if not self._may_start(num_new, step):
            return False
        self.pool.start(state)
        num_draft = min(state.num_drafts, max_num_drafts(self._limits, self.pool), step.budget - num_new)
        if num_draft > 0:
            num_slots = self.pool.extend_as_far_as_possible(state, state.num_tokens + num_draft)
            num_draft = min(num_draft, num_slots - state.num_tokens)
        step.add(state, min(num_new, step.budget, self._max_chunk_tokens), max(num_draft, 0))
        return True

    def _prompt_tokens_ahead(self, step: StepBuilder) -> int:
        """How many tokens of prompts the next step is likely to hold: what drafts in it cost depends on these.

        Of prompts under way, and of those that wait for budget only; how much of these the prefix cache has is not
        looked at. A prefill instance says 0, as its drafts are verified elsewhere.
        """
        if self._drafts_for_others:
            return 0
        pool, waiting, num_left = self.pool, self.pool.waiting, 0
        if sum(step.num_new) - sum(step.num_draft) > len(step.states):
            num_left = step.num_left(pool.counters, self._max_chunk_tokens)
        head = waiting.peek() if waiting and pool.num_free_seats > 0 else None
        if head is not None and head not in step.preempted and not self._kv.is_still_refused(head.table):
            num_next = min(pool.num_free_seats, len(waiting))
            num_left += min(waiting.num_prompt_tokens * num_next // len(waiting), num_next * self._max_chunk_tokens)
        return min(num_left, self._max_num_batched_tokens - len(step.states))

    def _may_start(self, num_new: int, step: StepBuilder) -> bool:
        """Whether the budget left is enough for a request with so many tokens to run, or for a chunk of them."""
        is_chunked = self._enable_chunked_prefill or num_new > self._max_num_batched_tokens
        return num_new <= step.budget or (is_chunked and step.budget > 0)

    def _preempt_last(self, step: StepBuilder) -> RequestState:
        """Preempt the running request with the highest key and take its row out of the step."""
        victim = self.pool.preempt_last()
        step.remove(victim)
        step.preempted.append(victim)
        return victim
