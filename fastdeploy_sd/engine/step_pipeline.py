"""Steps on a device that runs in its own time: the host prepares the next one, and sees to outputs, while one runs.

Two orders. A step needs what the one before gave, as drafts, masks or grammars hang on its tokens:

    device   [ step 1       ]        [ step 2       ]        [ step 3
    host                     commit 1,                commit 2,
                             plan 2,                  plan 3,
                             start 2  outputs of 1    start 3  outputs of 2

Or it needs no more than that each row got tokens, whichever: then it is *ahead*, and the device always has work:

    device   [ step 1       ][ step 2       ][ step 3
    host      plan 2, start 2 commit 1,       commit 2,
                              outputs of 1,   outputs of 2,
                              plan 3, start 3 plan 4, start 4

A request that ends with step 1 is in step 2 nevertheless; what that gives for it is dropped. Where drafts of step 1
were wrong, plan 2 has counted too many tokens: when it is committed it says what was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.engine.async_scheduler import AsyncScheduler
from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.interfaces.executor import Launcher
from fastdeploy_sd.engine.requests.request_state import RequestState, RequestStatus
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.types import I32, RequestOutput, Rows, SchedulerOutput


@dataclass(frozen=True, slots=True, eq=False)
class _InFlightStep:
    """A step that was started; `is_open`: another one may be started before it is over."""

    plan: SchedulerOutput
    states: tuple[RequestState, ...]
    is_open: bool

    @property
    def rows(self) -> Rows:
        """Those whose requests have not ended, intp[n]."""
        return np.array([r for r, state in enumerate(self.states) if state.status is RequestStatus.RUNNING], np.intp)


class StepPipeline:
    """Plans, starts and commits steps; between two calls of `advance` at most one is in flight."""

    def __init__(self, scheduler: Scheduler, ahead: AsyncScheduler, launcher: Launcher) -> None:
        self._scheduler, self._ahead, self._launcher = scheduler, ahead, launcher
        self._pool = scheduler.pool
        self._current: _InFlightStep | None = None

    @property
    def is_running(self) -> bool:
        return self._current is not None

    def advance(self) -> list[RequestOutput]:
        """Commit the step in flight, if there is one, and start the next; returns what the first one gave."""
        ahead, outputs = self._start_ahead(), list[RequestOutput]()
        if self._current is not None:
            outputs = self._commit(self._current)
            self._current = ahead
            if ahead is not None and not len(ahead.rows):  # who waits for it waits for the memory it holds
                self._commit(ahead)
                self._current = None
            elif ahead is not None:
                self._current = replace(ahead, plan=ahead.plan.with_lengths(self._num_tokens(ahead.states)))
        if self._current is None:
            self._current = self._start(self._scheduler.schedule())
        return outputs

    def _num_tokens(self, states: Sequence[RequestState]) -> I32:
        """Of each, i32[n]; those that have ended have as many as there can be."""
        counters, most = self._pool.counters, np.iinfo(np.int32).max
        running = RequestStatus.RUNNING
        counts = [counters.num_tokens.item(s.counter_row) if s.status is running else most for s in states]
        return np.array(counts, np.int32)

    def _start_ahead(self) -> _InFlightStep | None:
        step = self._current
        if step is None or not step.is_open:
            return None
        rows = step.rows
        plan = self._ahead.schedule(step.plan.take(rows), [step.states[r] for r in rows.tolist()])
        return None if plan is None else self._start(plan)

    def _start(self, plan: SchedulerOutput) -> _InFlightStep | None:
        if not plan.request_ids:
            return None
        states = tuple(self._pool.find(plan.request_ids)[0])
        self._pool.in_flight.begin(states)
        is_open = self._launcher.start(plan, is_open=self._ahead.is_open(plan))
        return _InFlightStep(plan, states, is_open)

    def _commit(self, step: _InFlightStep) -> list[RequestOutput]:
        result = self._launcher.finish()
        self._scheduler.observe(step.plan, result)
        self._pool.in_flight.end(step.states)
        rows, plan = step.rows, step.plan
        if len(rows) < len(step.states):
            plan, result = plan.take(rows), result.take(rows)
        return commit_result(self._pool, plan, result)
