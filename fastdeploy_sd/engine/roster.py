"""Who waits, who runs, and with which blocks: the books that planning and committing share.

Owns every request between submission and end, and the moves between the two groups. Knows no budget and no results.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import replace

import numpy as np

from fastdeploy_sd.engine.columns import RequestColumns, Rows
from fastdeploy_sd.engine.pending_drafts import PendingDrafts
from fastdeploy_sd.engine.request_state import RequestState, RequestStatus
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.engine.stats_recorder import StatsRecorder
from fastdeploy_sd.engine.waiting_queue import WaitingQueue
from fastdeploy_sd.kvcache.manager import KVCacheManager, PrefixMatch
from fastdeploy_sd.types import (
    FinishReason,
    NewRequest,
    RequestDelta,
    RequestId,
    RequestMetrics,
    SpeculationInfo,
)


class Roster:
    """A request is in exactly one place:

        enter --> waiting --admit--> running --close--> (gone)
                     ^-----preempt------'
                  waiting ---------------close--> (gone)

    Attributes:
        kv: the block tables; a waiting request has no blocks.
        columns: the counters of every request.
        drafts: what the executor proposed for the next step.
        stats: counters; every move counts itself.
        waiting: the queue. running: by key, so that the last one is the one to preempt.
        states: both groups by id.
    """

    def __init__(self, kv: KVCacheManager, max_num_seqs: int, speculation: SpeculationInfo) -> None:
        """Make empty books; at most `max_num_seqs` requests run at a time, drafted for as `speculation` says."""
        self.kv = kv
        self.columns = RequestColumns(speculation.max_draft_tokens)
        self.drafts = PendingDrafts(self.columns)
        self.stats = StatsRecorder()
        self.waiting = WaitingQueue()
        self.running: list[RequestState] = []
        self.states: dict[RequestId, RequestState] = {}
        self._max_num_seqs = max_num_seqs
        self._speculation = speculation
        self._finished_ids: list[RequestId] = []
        self._resized: dict[RequestId, RequestState] = {}  # since the executor was last told
        self._rows: Rows | None = None  # of `running`, None after it changed
        self._running_ids: tuple[RequestId, ...] = ()

    @property
    def running_rows(self) -> Rows:
        """The running requests' rows of the columns, in their order; made anew when they change."""
        return self._index_running()[0]

    @property
    def running_ids(self) -> tuple[RequestId, ...]:
        """The running requests' ids, in their order; the same tuple as long as they do not change."""
        return self._index_running()[1]

    def find(self, request_ids: tuple[RequestId, ...]) -> tuple[list[RequestState], Rows]:
        """The requests with these ids and their rows, in this order."""
        if request_ids is self.running_ids:
            return self.running, self.running_rows
        states = [self.states[request_id] for request_id in request_ids]
        return states, np.array([state.row for state in states], np.intp)

    @property
    def has_seat(self) -> bool:
        """Whether one more request may run."""
        return len(self.running) < self._max_num_seqs

    def enter(self, state: RequestState) -> None:
        """Queue a new request."""
        self.states[state.request_id] = state
        self.waiting.push(state)
        self.stats.num_requests += 1

    def admit(self, state: RequestState, match: PrefixMatch) -> bool:
        """Let a waiting request run, with blocks for all its tokens.

        Returns:
            False, with nothing changed, when there are not enough blocks.
        """
        if not self.kv.admit(state.table, match, state.num_tokens):
            return False
        self.waiting.remove(state)
        insort(self.running, state, key=_key)
        self._rows = None
        self._note_slots(state)
        state.start(match.num_tokens)
        if not state.first_scheduled_time:
            state.first_scheduled_time = time.time()
            state.num_cached_tokens = match.num_tokens
            self.stats.record_prefix_lookup(state.num_prompt_tokens, match.num_tokens)
        return True

    def preempt_last(self) -> RequestState:
        """Put the running request with the highest key back into the queue, without blocks, drafts or KV."""
        victim = self.running.pop()
        self._rows = None
        self.kv.free(victim.table)
        self._note_slots(victim)
        victim.go_back()
        self.waiting.push(victim)
        self.stats.num_preemptions += 1
        return victim

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
        """End a request: out of its group, its blocks given back. After an ERROR nobody finds their content again.

        Returns:
            What its last output reports.
        """
        # A running one stays in `running` until `sweep`, as ends come many at a time.
        if state.status is RequestStatus.RUNNING:
            self._finished_ids.append(state.request_id)
        else:
            self.waiting.remove(state)
        self.kv.free(state.table, discard=reason is FinishReason.ERROR)
        del self.states[state.request_id]
        metrics = state.metrics(now)
        self.stats.record_finish(
            reason, metrics, state.num_prompt_tokens, state.num_output_tokens, state.request.max_tokens
        )
        self.stats.record_tally(state.method, state.tally)
        state.finish()
        return metrics

    def sweep(self) -> None:
        """Take the requests that were closed out of `running`."""
        self.running = [state for state in self.running if state.status is RequestStatus.RUNNING]
        self._rows = None

    def take_finished_ids(self) -> tuple[RequestId, ...]:
        """Requests that ended since the last call and that the executor still has to drop."""
        finished_ids = tuple(self._finished_ids)
        self._finished_ids.clear()
        return finished_ids

    def take_block_changes(self) -> tuple[tuple[NewRequest, ...], tuple[RequestDelta, ...]]:
        """Requests the executor does not know, and blocks it does not, since the last call; then it counts as told."""
        new: list[NewRequest] = []
        deltas: list[RequestDelta] = []
        for state in self._resized.values():
            num_sent, block_ids = state.num_sent_blocks, state.table.block_ids
            state.num_sent_blocks = len(block_ids)
            if num_sent == len(block_ids):
                continue  # preempted, ended, or no block was left
            if num_sent:
                deltas.append(RequestDelta(state.request_id, tuple(block_ids[num_sent:])))
            else:
                token_ids = np.array(state.token_ids, np.int32)
                new.append(NewRequest(state.request, token_ids, state.num_prompt_tokens, tuple(block_ids)))
        self._resized.clear()
        return tuple(new), tuple(deltas)

    def snapshot(self) -> EngineStats:
        """Counters, histograms and gauges of this moment. O(requests)."""
        return replace(
            self.stats.snapshot((state.method, state.tally) for state in self.states.values()),
            speculation=self._speculation,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preempted_waiting=sum(state.num_preemptions > 0 for state in self.waiting),
            num_waiting_tokens=self.waiting.num_prompt_tokens,
            max_num_seqs=self._max_num_seqs,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free_blocks,
            num_cached_blocks=self.kv.num_cached_blocks,
        )

    def check_integrity(self) -> None:
        """Verify the books between two steps. O(tokens and blocks); for tests and debug mode.

        Raises:
            AssertionError: naming the broken rule.
        """
        self.kv.check_integrity()
        assert self.running == sorted(self.running, key=_key), "running requests out of order"
        assert len(self.running) <= self._max_num_seqs, f"{len(self.running)} requests run"
        everyone = [*self.running, *self.waiting]
        assert {state.request_id for state in everyone} == set(self.states), "a request is lost"
        assert len(everyone) == len(self.states), "a request runs and waits"
        assert len({state.row for state in everyone}) == len(everyone), "two requests share a row"
        assert self.running_rows.tolist() == [state.row for state in self.running], "the running rows are outdated"
        for state in self.running:
            state.check_running(self.kv.block_size)
        for state in self.waiting:
            state.check_waiting()

    def _index_running(self) -> tuple[Rows, tuple[RequestId, ...]]:
        if self._rows is None:
            self._rows = np.array([state.row for state in self.running], np.intp)
            self._running_ids = tuple([state.request_id for state in self.running])
        return self._rows, self._running_ids

    def _note_slots(self, state: RequestState) -> None:
        self.columns.num_slots[state.row] = state.table.num_slots
        self._resized[state.request_id] = state


def _key(state: RequestState) -> tuple[int, int]:
    return state.key
