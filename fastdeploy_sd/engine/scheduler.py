"""Which request runs how many tokens in the next step. Knows no executor and no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from operator import add, sub

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.engine.adapters import AdapterRegistry, AdapterSlots
from fastdeploy_sd.engine.connector_chain import ConnectorChain
from fastdeploy_sd.engine.interfaces.block_store import BlockStore
from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.interfaces.kv_connector import KVConnector, NoKVConnector
from fastdeploy_sd.engine.kvcache.block_table import NO_MATCH
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.prompt_budget import PromptBudget
from fastdeploy_sd.engine.requests.admission import AdmissionRules
from fastdeploy_sd.engine.requests.pool_inspection import snapshot_of, verify_pool
from fastdeploy_sd.engine.requests.request_pool import RequestPool
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.step_blocks import fit_drafts, make_room, max_num_drafts, preempt, reserve_lookahead, victims
from fastdeploy_sd.engine.step_builder import StepBuilder
from fastdeploy_sd.engine.swap_space import SwapSpace
from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.types import ModelInfo, Request, RequestId, Rows, SchedulerOutput, StepResult
from fastdeploy_sd.types.stats import EngineStats


class Scheduler:
    """One rule: each step lets a request's computed tokens catch up with its tokens, within the token budget.

    A chunk of a prompt, a prefix hit, recomputation after preemption, plain decoding and verification of drafts are all
    the distance between the two. Source: vLLM v1's num_computed_tokens (vllm/v1/core/sched/scheduler.py).

    Order: by arrival, under the 'priority' policy by priority first. Running requests are served before waiting ones,
    and requests that decode before prompts. The head of the queue has the lowest key, under the 'fair' policy of the
    client with the fewest seats; only shorter prompts overtake it, under 'fair'.

    Blocks: a request is admitted when there are blocks for all its tokens. A running request that finds none preempts
    the running one with the highest key, perhaps itself; under 'priority' and 'fair' the head of the queue preempts
    too. Neither drafts nor the slots that drafting writes ahead preempt requests. A row keeps the blocks of rejected
    drafts, so another may find none, and preempt, sooner than without speculation.

    Adapters: a request waits for a place for its adapter, and preempts no one for it. Only those without overtake it.
    Under 'fair' clients take turns with places as with seats.

    Readiness: a request whose grammar is being compiled, or whose adapter is being read, does not hold up those after
    it. One whose KV a connector brings keeps seat and blocks, and is in no step until that has arrived.
    """

    def __init__(
        self,
        config: Config,
        model_info: ModelInfo,
        connector: KVConnector,
        store: BlockStore | None = None,
        grammars: Grammars | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """Make a scheduler without requests; `model_info`, not `config`, says how large the cache is."""
        limits = config.scheduler
        self._prompts = PromptBudget(limits)
        self._drafts_for_others = config.splitwise.splitwise_role == "prefill"
        self._rules = AdmissionRules(limits, model_info)
        self._speculation = model_info.speculation
        self._limits = limits
        num_drafts, text = self._speculation.max_draft_tokens, f"a step of {limits.max_num_batched_tokens} tokens"
        assert num_drafts < limits.rows_of_request(1), f"{num_drafts} drafts do not fit into {text}"
        self._kv = KVCacheManager(
            model_info.num_blocks,
            model_info.groups,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            num_snapshots=model_info.num_state_snapshots,
        )
        if self._kv.states is not None:
            self._kv.states.hands_over = self._drafts_for_others
        is_alone = isinstance(connector, NoKVConnector)
        self._swap = None if store is None else SwapSpace(self._kv, store)
        if self._swap is not None:
            connector = self._swap if is_alone else ConnectorChain(self._swap, connector)
        self.connector = connector
        self._adapters = adapters or AdapterRegistry(LoraConfig(), None)
        slots = AdapterSlots(model_info.num_adapter_slots, self._adapters.reader)
        self.pool = RequestPool(self._kv, limits.max_num_seqs, self._speculation, connector, grammars, slots)
        self._num_arrived = 0
        self._step_id = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequest: its id is in use, a rule is broken, its grammar is not valid, or it could never run here.
            NotFound: its adapter is not loaded.
            Overloaded: the queue is full. An empty queue takes any request.
        """
        name = request.request_id
        if name in self.pool.states:
            raise BadRequest(f"request_id: expected one not in use, got {shown(name)}", param="request_id")
        waiting, preparing, adapter = self.pool.waiting, self.pool.preparing, self._adapters.find(request.adapter)
        self._rules.verify(request)
        client = request.client if self._limits.policy == "fair" else ""
        num_tokens = waiting.num_prompt_tokens + preparing.num_prompt_tokens
        own = waiting.clients.get(client, ())
        self._rules.verify_queue(
            len(waiting) + len(preparing),
            num_tokens,
            len(request.prompt_token_ids),
            num_own=len(own),
            num_clients=len(waiting.clients) + (not own),
        )
        is_prepared = preparing.hold(request)
        key = (request.priority if self._limits.policy == "priority" else 0, self._num_arrived)
        self._num_arrived += 1
        state = RequestState(request, key, time.time(), self._speculation, self.pool.counters, client)
        state.adapter = adapter
        self.pool.enter(state, is_prepared=is_prepared)

    def schedule(self, running: tuple[list[RequestState], Rows] | None = None) -> SchedulerOutput:
        """Plan the next step, with all running requests or these (and their counters); one without rows is not run."""
        pool = self.pool
        step = self._begin_with_running(running or pool.held.others(pool.running))
        if self._start_ready(step):
            self._admit_waiting(step)
        finished_ids = preempted_ids = tuple[RequestId, ...]()
        if step.states:
            self._step_id += 1
            finished_ids, preempted_ids = pool.take_dropped_ids()
        num_new = np.array(step.num_new, np.int32)
        draft = pool.drafts.collect(step.counter_rows, step.num_draft)
        max_draft_len, num_ahead = np.zeros(len(step.states), np.int32), 0
        if self._speculation.max_draft_tokens and pool.drafts.skip_draft_steps == 0:
            num_ahead = self._prompt_tokens_ahead(step)
            max_draft_len = step.max_draft_len(pool.counters, max_num_drafts(self._limits, pool))
        if self._speculation.num_lookahead_slots:
            reserve_lookahead(pool, step, max_draft_len)
        num_computed_tokens, states = pool.counters.num_computed_tokens.take(step.counter_rows), None
        if self._kv.states is not None:
            tables = [state.table for state in step.states]
            states = self._kv.states.plan(tables, num_computed_tokens.tolist(), step.num_new)
        new, deltas = pool.take_block_changes()
        loads = [pool.adapters.take_load(one.adapter_slot) for one in new]
        ids = pool.running_ids if step.states == pool.running else tuple([s.request_id for s in step.states])
        return SchedulerOutput(
            step_id=self._step_id,
            request_ids=ids,
            new=new,
            deltas=deltas,
            num_computed_tokens=num_computed_tokens,
            num_new_tokens=num_new,
            draft=draft,
            max_draft_len=max_draft_len,
            finished_ids=finished_ids,
            preempted_ids=preempted_ids,
            num_prompt_tokens_ahead=num_ahead,
            states=states,
            adapter_loads=tuple(load for load in loads if load is not None),
        )

    def stats(self) -> EngineStats:
        stats = snapshot_of(self.pool)
        return stats if self._swap is None else replace(stats, swap=self._swap.stats())

    def check_integrity(self) -> None:
        verify_pool(self.pool)
        if self._swap is not None:
            self._swap.check_integrity()

    def observe(self, plan: SchedulerOutput, result: StepResult) -> None:
        self._prompts.time.observe(plan, result)

    @property
    def may_preempt_for_waiting(self) -> bool:
        """Whether a waiting request may preempt a running one in the next step."""
        head = self._head()
        return head is not None and bool(self._victims(head, has_seat=True))

    def _begin_with_running(self, running: tuple[list[RequestState], Rows] | None) -> StepBuilder:
        pool = self.pool
        states, rows = running or (list(pool.running), pool.running_rows)
        num_tokens, num_computed, num_slots, num_draft = pool.counters.read(rows)
        num_own = list(map(sub, num_tokens, num_computed))
        if any(num_draft):
            most = max_num_drafts(self._limits, pool)
            num_draft = [min(count, most) for count in num_draft]
        num_new = list(map(add, num_own, num_draft))  # drafts are only after the last token of a request
        num_prompts = len(num_own) - num_own.count(1)
        num_decoding = sum(count for count, own in zip(num_new, num_own, strict=True) if own == 1)
        prompt_budget = self._prompts.max_tokens(num_decoding)
        step = StepBuilder(self._limits.max_num_batched_tokens, states, rows, num_new, num_draft, prompt_budget)
        if num_prompts:
            step.share_prompts(self._prompts, self._waiting_by_length())
            _, num_computed, num_slots, _ = pool.counters.read(step.counter_rows)  # rows may have been taken out
        if step.budget < 0:
            step.cut_to_budget()
        ends = list(map(add, num_computed, step.num_new))
        short = [row for row, (end, count) in enumerate(zip(ends, num_slots, strict=False)) if end > count]
        if short:
            make_room(pool, step, short, ends)
            # Only now that every row has blocks for its own tokens, as drafts must not preempt a request.
            fit_drafts(pool, step, short, ends)
        return step

    def _waiting_by_length(self) -> Sequence[RequestState]:
        """The waiting requests that could be admitted now if they were the head of the queue, shortest first."""
        pool = self.pool
        head = self._head() if pool.num_free_seats > 0 else None
        if head is None or self._kv.is_still_refused(head.table):
            return ()
        return list(islice(filter(self._may_start(), pool.waiting), pool.num_free_seats))

    def _start_ready(self, step: StepBuilder) -> bool:
        """Start the admitted requests that are ready; False if one must wait for budget, as none overtakes it."""
        return not self.pool.admitted or all(self._start(state, step) for state in self.pool.ready())

    def _admit_waiting(self, step: StepBuilder) -> None:
        for state in step.shorter:
            if state in step.preempted or not self._admit(state, step):
                break
        while step.budget > 0:
            head = self._head()
            if head is None or head in step.preempted or not self._admit(head, step):
                break

    def _admit(self, state: RequestState, step: StepBuilder) -> bool:
        if self._kv.is_still_refused(state.table) or not self.pool.adapters.has_room(state.adapter):
            return False  # nor has anyone come to a seat since whom it may preempt, as none overtakes it
        if not self.pool.adapters.begin(state):
            return True  # in the queue, until its adapter is read
        has_seat, candidates = self.pool.num_free_seats > 0, list[RequestState]()
        if not has_seat and not (candidates := self._victims(state, has_seat=False)):
            return False
        owes_prompt = state.owes_prompt  # then no KV is taken over
        match = NO_MATCH if owes_prompt else self._kv.match_prefix(state.table, state.token_ids, state.num_tokens)
        if not self._prompts.may_start(num_new := state.num_tokens - match.num_tokens, step.room_for(num_new)):
            return False
        if not has_seat or not self.pool.admit(state, match):
            candidates = candidates or self._victims(state, has_seat=True)
            if not candidates or not self._kv.fits_without([v.table for v in candidates], match, state.num_tokens):
                return False
            for victim in candidates:
                preempt(self.pool, step, victim)
                if self.pool.admit(state, match):
                    break
        state.is_ready = owes_prompt or state.takes_no_kv or not self.pool.waits_for_kv(state, match.num_tokens)
        return not state.is_ready or self._start(state, step)

    def _head(self) -> RequestState | None:
        """The request to admit next."""
        return self.pool.head(self._may_start())

    def _may_start(self) -> Callable[[RequestState], bool]:
        """Return which waiting requests may be admitted: not those whose adapters are being read.

        While the head of the queue finds no place for its adapter, others that need places wait after it.
        """
        adapters = self.pool.adapters
        head = self.pool.head(adapters.is_read)
        return adapters.is_read if head is None or adapters.has_room(head.adapter) else adapters.has_place

    def _victims(self, state: RequestState, *, has_seat: bool) -> list[RequestState]:
        return victims(self.pool, state, self._limits.policy, has_seat=has_seat)

    def _start(self, state: RequestState, step: StepBuilder) -> bool:
        num_new = state.num_tokens - state.num_computed_tokens
        room = step.room_for(num_new)
        if not self._prompts.may_start(num_new, room):
            return False
        self.pool.start(state)
        num_draft = min(state.num_drafts, max_num_drafts(self._limits, self.pool), room - num_new)
        if num_draft > 0:
            num_slots = self.pool.extend_as_far_as_possible(state, state.num_tokens + num_draft)
            num_draft = min(num_draft, num_slots - state.num_tokens)
        step.add(state, self._prompts.chunk(num_new, room), max(num_draft, 0))
        return True

    def _prompt_tokens_ahead(self, step: StepBuilder) -> int:
        """How many tokens of prompts the next step is likely to hold: what drafts in it cost depends on these.

        Of prompts that run, and of those that wait for budget only; what of these the prefix cache has is not
        counted. A prefill instance says 0, as its drafts are verified elsewhere.
        """
        if self._drafts_for_others:
            return 0
        pool, waiting, num_left = self.pool, self.pool.waiting, 0
        if sum(step.num_new) - sum(step.num_draft) > len(step.states):
            num_left = step.num_left(pool.counters, self._prompts.max_chunk)
        head = self._head() if pool.num_free_seats > 0 else None
        if head is not None and head not in step.preempted and not self._kv.is_still_refused(head.table):
            num_next = min(pool.num_free_seats, len(waiting))
            num_left += min(waiting.num_prompt_tokens * num_next // len(waiting), num_next * self._prompts.max_chunk)
        return min(
            num_left, self._prompts.max_tokens(len(step.states)), self._limits.max_num_batched_tokens - len(step.states)
        )
