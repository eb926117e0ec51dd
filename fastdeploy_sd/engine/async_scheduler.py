"""Plans the step after one whose tokens are not known yet. Knows no device.

A row that is due gets as many tokens as its drafts are right, and one. The plan after it counts on all of them:

    step n        [newest d d d]             4 positions, up to 4 tokens
    plan of n+1                 [newest d d d]
    3 were right  [...........] [newest d d d]
    1 was right   [.....] [newest d d d]     what runs is the same, as many positions earlier

So blocks and limits hold for whatever comes, and what was counted too much is taken back when it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.types import I32, MADE_ON_DEVICE, DraftTokens, Rows, SchedulerOutput, offsets
from fastdeploy_sd.types.draft_methods import METHODS


class AsyncScheduler:
    """One rule: a step gives each of its rows that is due its drafts at most and a token, and the next plan needs no
    more.

    Where more is needed, there is no plan: where drafts are made that the executor does not keep for itself, or
    a request has rules that read the text (a grammar, bad words, min_tokens), or wants log-probabilities, which are
    read from what the step left; where a model has recurrent states, which tokens that are taken back would spoil;
    and where a request may have to be preempted, which could not keep the tokens that it is about to get.
    """

    def __init__(self, scheduler: Scheduler, *, drafts_async: bool) -> None:
        self._scheduler, self._pool, self._drafts_async = scheduler, scheduler.pool, drafts_async

    def is_open(self, plan: SchedulerOutput) -> bool:
        """Whether there may be a plan after this one, which was just made, before its result is known."""
        pool = self._pool
        rests = pool.speculation.max_draft_tokens == 0 or (
            pool.drafts.skip_draft_steps > 0 and not len(plan.draft.token_ids)
        )
        return (rests or self._drafts_async) and pool.num_text_bound == 0 and pool.kv.states is None

    def schedule(self, plan: SchedulerOutput, states: Sequence[RequestState]) -> SchedulerOutput | None:
        """Plan the step after one that is in flight, whose rows all run; None = there is none.

        Who may get its last token from that one is not in it; who ends otherwise is. The counters of those
        rows are wrong until that step is committed.
        """
        pool, c = self._pool, self._pool.counters
        num_available = pool.kv.num_free_blocks + pool.kv.num_cached_blocks
        may_preempt = num_available < len(pool.running) * len(pool.kv.groups)
        if may_preempt or pool.num_text_bound or self._scheduler.may_preempt_for_waiting:
            return None
        rows = np.array([state.counter_row for state in states], np.intp)
        num_drafts: I32 = np.diff(plan.draft.cu_num_draft)
        ends = plan.num_computed_tokens + plan.num_new_tokens - num_drafts
        is_due = ends == c.num_tokens.take(rows)
        c.num_computed_tokens[rows] = ends + num_drafts
        c.num_tokens[rows] += (1 + num_drafts) * is_due
        c.num_drafts[rows] = 0  # what a row had that found no room in that step
        self._expect_drafts(rows, plan.max_draft_len * is_due)
        pool.drafts.skip_draft_steps = max(pool.drafts.skip_draft_steps - 1, 0)
        running = pool.running_rows
        goes_on = c.num_tokens.take(running) < c.max_total_tokens.take(running)
        ahead = self._scheduler.schedule((list(compress(pool.running, goes_on.tolist())), running[goes_on]))
        return ahead if ahead.request_ids else None

    def _expect_drafts(self, rows: Rows, counts: I32) -> None:
        """Have rows keep so many drafts that the executor will have made by then, but for those without room."""
        if counts.any():
            token_ids = np.full(counts.sum(), MADE_ON_DEVICE, np.int32)
            source = METHODS[self._pool.speculation.method].source
            assert source is not None, "the method that drafts ahead makes drafts"
            sources = np.full(len(token_ids), int(source), np.int8)
            self._pool.drafts.keep(rows, DraftTokens(token_ids, offsets(counts), sources))
