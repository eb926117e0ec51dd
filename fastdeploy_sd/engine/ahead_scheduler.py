"""Plans the step behind one whose tokens are not known yet. Knows no device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.types import SchedulerOutput


class AheadScheduler:
    """One rule: a step without drafts gives each of its rows that is due one token, and the next plan needs no more.

    Where more is needed, there is no plan: where drafts are verified or made, or somebody has rules that read the text
    (a grammar, bad words, min_tokens), or wants log-probabilities, which are read from what the step left; and where a
    request may have to be preempted, which could not keep the token that it is about to get.
    """

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        self._scheduler, self._pool = scheduler, scheduler.pool
        self._order_by_priority = config.scheduler.policy == "priority"

    def is_open(self, plan: SchedulerOutput) -> bool:
        """Whether there may be a plan behind this one, which was just made, before its result is known."""
        pool = self._pool
        rests = pool.speculation.max_draft_tokens == 0 or (pool.drafts.num_rests > 0 and not len(plan.draft.token_ids))
        return rests and pool.num_text_bound == 0

    def schedule(self, plan: SchedulerOutput, states: Sequence[RequestState]) -> SchedulerOutput | None:
        """Plan the step behind one that is under way.

        Who gets its last token from that one is not in it; who ends otherwise is.

        Args:
            plan: of that step. states: its rows, all of which run.

        Returns:
            None where there is no plan, or nobody in it. The counters of those rows are right again when that step is
            committed, and nobody may look at them before.
        """
        pool, c = self._pool, self._pool.counters
        may_preempt = pool.kv.num_free_blocks + pool.kv.num_cached_blocks < len(pool.running)
        if may_preempt or pool.num_text_bound or (self._order_by_priority and pool.waiting):
            return None
        rows = np.array([state.counter_row for state in states], np.intp)
        ends = plan.num_computed_tokens + plan.num_new_tokens
        c.num_tokens[rows] += ends == c.num_tokens.take(rows)
        c.num_computed_tokens[rows] = ends
        c.num_drafts[rows] = 0  # what a row had that found no room in that step
        pool.drafts.num_rests = max(pool.drafts.num_rests - 1, 0)
        running = pool.running_rows
        goes_on = c.num_tokens.take(running) < c.max_total_tokens.take(running)
        ahead = self._scheduler.schedule((list(compress(pool.running, goes_on.tolist())), running[goes_on]))
        return ahead if ahead.request_ids else None
