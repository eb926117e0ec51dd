"""Who waits, who runs, and with which blocks: the books that planning and committing share.

Owns every request between submission and end, and the moves between the two groups. Knows no budget and no results.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import replace

from fastdeploy_sd.engine.request_state import RequestState, RequestStatus
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.engine.stats_recorder import StatsRecorder
from fastdeploy_sd.engine.waiting_queue import WaitingQueue
from fastdeploy_sd.kvcache.manager import KVCacheManager, PrefixMatch
from fastdeploy_sd.types import FinishReason, RequestId, RequestMetrics, SpeculationInfo


class Roster:
    """A request is in exactly one place:

        enter --> waiting --admit--> running --close--> (gone)
                     ^-----preempt------'
                  waiting ---------------close--> (gone)

    Attributes:
        kv: the block tables; a waiting request has no blocks.
        stats: counters; every move counts itself.
        waiting: the queue. running: by key, so that the last one is the one to preempt.
        states: both groups by id.
    """

    def __init__(self, kv: KVCacheManager, max_num_seqs: int, speculation: SpeculationInfo) -> None:
        """Make empty books; at most `max_num_seqs` requests run at a time, drafted for as `speculation` says."""
        self.kv = kv
        self.stats = StatsRecorder()
        self.waiting = WaitingQueue()
        self.running: list[RequestState] = []
        self.states: dict[RequestId, RequestState] = {}
        self._max_num_seqs = max_num_seqs
        self._speculation = speculation
        self._finished_ids: list[RequestId] = []

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
        state.status = RequestStatus.RUNNING
        state.num_computed_tokens = match.num_tokens
        if not state.first_scheduled_time:
            state.first_scheduled_time = time.time()
            state.num_cached_tokens = match.num_tokens
            self.stats.record_prefix_lookup(state.num_prompt_tokens, match.num_tokens)
        return True

    def preempt_last(self) -> RequestState:
        """Put the running request with the highest key back into the queue, without blocks, drafts or KV."""
        victim = self.running.pop()
        self.kv.free(victim.table)
        victim.reset_progress()
        self.waiting.push(victim)
        self.stats.num_preemptions += 1
        return victim

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
        state.status = RequestStatus.FINISHED
        del self.states[state.request_id]
        metrics = state.metrics(now)
        self.stats.record_finish(
            reason, metrics, state.num_prompt_tokens, state.num_output_tokens, state.request.max_tokens
        )
        self.stats.record_tally(state.method, state.tally)
        return metrics

    def sweep(self) -> None:
        """Take the requests that were closed out of `running`."""
        self.running = [state for state in self.running if state.status is RequestStatus.RUNNING]

    def take_finished_ids(self) -> tuple[RequestId, ...]:
        """Requests that ended since the last call and that the executor still has to drop."""
        finished_ids = tuple(self._finished_ids)
        self._finished_ids.clear()
        return finished_ids

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
        for state in self.running:
            state.check_running()
        for state in self.waiting:
            state.check_waiting()


def _key(state: RequestState) -> tuple[int, int]:
    return state.key
