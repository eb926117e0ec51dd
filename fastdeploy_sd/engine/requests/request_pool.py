"""RequestPool: who waits, who runs, and with which blocks. What planning and committing share.

Owns every request between submission and end, and the moves between the groups. Knows no budget and no results.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from operator import attrgetter

import numpy as np

from fastdeploy_sd.engine.adapters import AdapterSlots
from fastdeploy_sd.engine.in_flight_rows import InFlightRows
from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.interfaces.kv_connector import SWAP, KvArrival, KVConnector
from fastdeploy_sd.engine.kvcache.block_table import PrefixMatch
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.pending_drafts import PendingDrafts
from fastdeploy_sd.engine.requests.block_changes import block_changes
from fastdeploy_sd.engine.requests.preparing_requests import HeldRequests, PreparingRequests
from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.engine.requests.request_state import RequestState, RequestStatus
from fastdeploy_sd.engine.requests.waiting_queue import WaitingQueue
from fastdeploy_sd.engine.stats_recorder import StatsRecorder
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import (
    FinishReason,
    NewRequest,
    RequestDelta,
    RequestId,
    RequestMetrics,
    RequestOutput,
    Rows,
    SpeculationInfo,
)


class RequestPool:
    """A request is in exactly one group until `close` takes it out of that one:

        enter --> preparing --> waiting --admit--> admitted --start--> running
              '---------------^    ^----------preempt--'--------preempt---'

    One that need not wait for anything is admitted and started in the same step.

    Attributes:
        kv, adapters: the block tables, and the places of LoRA adapters. counters: of every request.
        drafts: what the executor proposed for the next step. stats: counters; every move counts itself.
        waiting: the queue. preparing: not in it yet. admitted: have a seat and blocks, and wait to be ready or for
            budget; by id.
        running: by key. num_seats: requests that are admitted or run, by client; no zeros.
        states: all groups by id. num_text_bound: how many of them are, see RequestState. in_flight: in steps that are
            not over. held: those of the running that no step may have yet.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        max_num_seqs: int,
        speculation: SpeculationInfo,
        connector: KVConnector,
        grammars: Grammars | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Make an empty pool; `connector` is told when a request that waits for it loses its blocks."""
        self.kv, self.adapters, self.counters = kv, adapters or AdapterSlots(0), RequestCounters()
        self.drafts = PendingDrafts(self.counters)
        self.stats = StatsRecorder()
        self.waiting, self.preparing, self.held = WaitingQueue(), PreparingRequests(grammars), HeldRequests(grammars)
        self.admitted: dict[RequestId, RequestState] = {}
        self.running: list[RequestState] = []
        self.num_seats: Counter[str] = Counter()
        self.states: dict[RequestId, RequestState] = {}
        self.in_flight, self.num_text_bound = InFlightRows(kv), 0
        self.max_num_seqs = max_num_seqs
        self.speculation, self._connector = speculation, connector
        self._finished_ids, self._preempted_ids = list[RequestId](), list[RequestId]()  # the executor is to be told
        self._resized: dict[RequestId, RequestState] = {}  # running ones whose blocks changed since then
        self._rows: Rows | None = None  # of `running`, None after it changed
        self._running_ids: tuple[RequestId, ...] = ()

    @property
    def running_rows(self) -> Rows:
        """The running requests' rows of the counters, in their order; made anew when they change."""
        return self._index_running()[0]

    @property
    def running_ids(self) -> tuple[RequestId, ...]:
        """The running requests' ids, in their order; made anew when they change."""
        return self._index_running()[1]

    def find(self, request_ids: tuple[RequestId, ...]) -> tuple[list[RequestState], Rows]:
        if request_ids == self.running_ids:
            return self.running, self.running_rows
        states = [self.states[request_id] for request_id in request_ids]
        return states, np.array([state.counter_row for state in states], np.intp)

    @property
    def num_free_seats(self) -> int:
        return self.max_num_seqs - len(self.running) - len(self.admitted)

    def head(self, may_start: Callable[[RequestState], bool]) -> RequestState | None:
        """The request to admit next; see WaitingQueue.peek."""
        return self.waiting.peek(self.num_seats, chain(self.running, self.admitted.values()), may_start)

    def enter(self, state: RequestState, *, is_prepared: bool = True) -> None:
        """Queue a new request, or keep it in front of the queue until its grammar, which it holds, is ready."""
        self.states[state.request_id] = state
        self.num_text_bound += state.is_text_bound
        (self.waiting.push if is_prepared else self.preparing.add)(state)
        self.stats.num_requests += 1

    def take_prepared(self) -> list[tuple[RequestState, str]]:
        """Queue the requests whose grammars are ready now; return those to end, and what is wrong with theirs."""
        ready, failed = self.preparing.take()
        for state in ready:
            state.status = RequestStatus.WAITING
            self.waiting.push(state)
        return failed

    def admit(self, state: RequestState, match: PrefixMatch) -> bool:
        """Give a waiting request, whose adapter has room, a seat and all its blocks; False, unchanged: too few."""
        num_lost = self.kv.num_unshared(match, state.other_salts(self.speculation.kv_kinds), state.token_ids)
        if not self.kv.admit(state.table, match, state.num_tokens):
            return False
        self.waiting.remove(state)
        self.admitted[state.request_id] = state
        self.adapters.enter(state)
        self.num_seats[state.client] += 1
        self.counters.num_slots[state.counter_row] = state.table.num_slots
        state.admit(match.num_tokens)
        if not state.num_preemptions:
            state.num_cached_tokens = match.num_tokens
            self.stats.record_prefix_lookup(state.num_prompt_tokens, match.num_tokens, num_lost)
        return True

    def waits_for_kv(self, state: RequestState, num_cached_tokens: int) -> bool:
        """Offer an admitted request to the connector, and return whether it waits for KV then."""
        token_ids, block_ids = np.array(state.token_ids, np.int32), state.table.block_ids
        waits = self._connector.begin(state.request, token_ids, num_cached_tokens, block_ids)
        self.counters.num_slots[state.counter_row] = state.table.num_slots
        return waits

    def take_arrival(self, arrival: KvArrival) -> None:
        """Let an admitted request run, from the KV that it has now; its full blocks are there for others too."""
        if arrival.request_id not in self.states:
            raise InternalError(f"KV for {arrival.request_id}: expected a request that waits, got {arrival}")
        state = self.states[arrival.request_id]
        state.take_arrival(arrival, self.kv.block_size)
        self.stats.record_arrival(arrival.origins, arrival.failure)
        state.takes_no_kv = arrival.is_lost
        if arrival.is_lost:
            return self.preempt(state)
        self.kv.publish(state.table, state.token_ids, arrival.num_tokens)
        num_swapped = arrival.origins.get(SWAP, 0)
        if num_swapped and not state.num_preemptions:
            self.stats.record_swap_hit(num_swapped, is_first=not state.num_cached_tokens)
            state.num_cached_tokens += num_swapped

    def ready(self) -> list[RequestState]:
        return sorted((state for state in self.admitted.values() if state.is_ready), key=_key)

    def start(self, state: RequestState) -> None:
        """Let an admitted request run; it must have a row in the step under construction."""
        del self.admitted[state.request_id]
        insort(self.running, state, key=_key)
        self._rows = None
        self._resized[state.request_id] = state
        state.status = RequestStatus.RUNNING
        if state.arrival is not None:
            self.drafts.hand_over(state.counter_row, state.arrival.drafts)
        self.drafts.skip_draft_steps = 0
        state.first_scheduled_time = state.first_scheduled_time or time.time()

    def seated(self) -> list[RequestState]:
        """The requests with a seat, by key: the last one is the one to preempt."""
        return sorted([*self.running, *self.admitted.values()], key=_key) if self.admitted else self.running

    def preempt(self, victim: RequestState) -> None:
        """Put a request that has a seat back into the queue, without blocks, drafts or KV."""
        if victim.status is RequestStatus.RUNNING:
            if victim.table.is_sent:  # else it was started for the step that is being planned
                self._preempted_ids.append(victim.request_id)
            self.running.remove(victim)
            self._rows = None
        else:
            self._withdraw(victim)
        self._leave_seat(victim)
        self.kv.free(victim.table)
        self._note_slots(victim)
        victim.go_back()
        self.waiting.push(victim)
        self.stats.num_preemptions += 1

    def extend(self, state: RequestState, num_tokens: int) -> bool:
        """Give a running request blocks for `num_tokens` tokens; False, with nothing changed, if there are too few."""
        is_extended = self.kv.extend(state.table, num_tokens)
        self._note_slots(state)
        return is_extended

    def extend_as_far_as_possible(self, state: RequestState, num_tokens: int) -> int:
        """Give a running request blocks towards `num_tokens` tokens; returns how many tokens fit in then."""
        self.kv.extend_as_far_as_possible(state.table, num_tokens)
        self._note_slots(state)
        return state.table.num_slots

    def close(self, state: RequestState, reason: FinishReason, now: float) -> RequestMetrics:
        """End a request: out of its group, its blocks given back. After an ERROR their content is not found again."""
        if state.status is RequestStatus.RUNNING:  # it stays in `running` until `sweep`: ends come many at a time
            self._finished_ids.append(state.request_id)
            self._leave_seat(state, has_failed=reason is FinishReason.ERROR)
        elif state.status is RequestStatus.ADMITTED:
            self._withdraw(state)
            self._leave_seat(state)
        elif state.status is RequestStatus.PREPARING:
            self.preparing.remove(state)
        else:
            self.waiting.remove(state)
            self.adapters.leave(state)
        self.in_flight.hold(state)
        self.kv.free(state.table, discard=reason is FinishReason.ERROR)
        self.preparing.drop(state.request)
        del self.states[state.request_id]
        self.num_text_bound -= state.is_text_bound
        metrics = state.metrics(now, self.stats.gain_of(state.method))
        self.stats.record_finish(
            reason, metrics, state.num_prompt_tokens, state.num_output_tokens, state.request.max_tokens
        )
        self.stats.record_drafts(state.method, state.drafts)
        state.finish()
        return metrics

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason) -> list[RequestOutput]:
        """End requests between steps, wherever they are; returns their last outputs. Unknown ids are ignored."""
        now, outputs = time.time(), []
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is None:
                continue
            metrics = self.close(state, reason, now)
            outputs.append(replace(state.empty_output(), finish_reason=reason, metrics=metrics))
        self.sweep()
        return outputs

    def sweep(self) -> None:
        """Take the requests that were closed out of `running`."""
        self.running = [state for state in self.running if state.status is RequestStatus.RUNNING]
        self._rows = None

    def take_dropped_ids(self) -> tuple[tuple[RequestId, ...], tuple[RequestId, ...]]:
        """Requests that ended, and that were preempted, since the last call: the executor still has to drop them."""
        finished_ids, self._finished_ids = self._finished_ids, []
        preempted_ids, self._preempted_ids = self._preempted_ids, []
        return tuple(finished_ids), tuple(preempted_ids)

    def take_block_changes(self) -> tuple[tuple[NewRequest, ...], tuple[RequestDelta, ...]]:
        """Requests the executor does not know, and blocks it does not, since the last call; then it counts as told."""
        new, deltas = block_changes(self._resized.values())
        self._resized.clear()
        return new, deltas

    def _index_running(self) -> tuple[Rows, tuple[RequestId, ...]]:
        if self._rows is None:
            self._rows = np.array([state.counter_row for state in self.running], np.intp)
            self._running_ids = tuple([state.request_id for state in self.running])
        return self._rows, self._running_ids

    def _withdraw(self, state: RequestState) -> None:
        del self.admitted[state.request_id]
        if not state.is_ready:
            self._connector.cancel(state.request_id)
            self.stats.num_kv_cancels += 1

    def _leave_seat(self, state: RequestState, *, has_failed: bool = False) -> None:
        self.num_seats -= Counter([state.client])  # keeps no zeros
        self.adapters.leave(state, has_failed=has_failed)
        self.held.forget(state.request_id)

    def _note_slots(self, state: RequestState) -> None:
        self.counters.num_slots[state.counter_row] = state.table.num_slots
        self._resized[state.request_id] = state


_key = attrgetter("key")
