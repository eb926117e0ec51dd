"""Blocks for the rows of a step under construction, and which requests lose theirs. Knows no budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.config import SchedulerConfig
from fastdeploy_sd.engine.requests.request_pool import RequestPool
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.step_builder import StepBuilder
from fastdeploy_sd.types import I32


def preempt(pool: RequestPool, step: StepBuilder, victim: RequestState) -> None:
    pool.preempt(victim)
    step.remove(victim)
    step.preempted.append(victim)


def make_room(pool: RequestPool, step: StepBuilder, rows: Sequence[int], ends: Sequence[int]) -> None:
    """Extend these rows' blocks to `ends` less their drafts, preempting from the end; it may hit the row itself."""
    for row in rows:
        if row >= len(step.states):
            return  # preempted for a row before it
        state, end = step.states[row], ends[row] - step.num_draft[row]
        while end > state.table.num_slots and not pool.extend(state, end):
            victim = pool.seated()[-1]
            preempt(pool, step, victim)
            if victim is state:
                return


def fit_drafts(pool: RequestPool, step: StepBuilder, rows: Sequence[int], ends: Sequence[int]) -> None:
    """Give these rows blocks to `ends` while there are any, and shorten their drafts to the slots they have."""
    for row in rows:
        if row >= len(step.states):
            return
        num_short = ends[row] - pool.extend_as_far_as_possible(step.states[row], ends[row])
        if num_short > 0:
            step.shorten_drafts(row, step.num_draft[row] - num_short)


def reserve_lookahead(pool: RequestPool, step: StepBuilder, max_draft_len: I32) -> None:
    """Give rows that will be drafted for with a model the slots this writes, while there are blocks.

    With c computed tokens and n new ones the newest token may come to position c + n, and d drafts write:

        [0 ....... c) [c ....... c+n) [c+n ........ c+n+d)      and never the slot of the request's last token
           computed      this step        look-ahead

    A row that gets none is drafted for as far as its slots go. Comes last, so that no request is preempted or kept
    waiting in this step for it.
    """
    c, rows = pool.counters, step.counter_rows
    num_lookahead = c.num_lookahead_slots.take(rows)
    ends = c.num_computed_tokens.take(rows) + np.array(step.num_new, np.int32) + num_lookahead
    num_spared = np.maximum(num_lookahead - max_draft_len, 0)
    num_useful = np.minimum(ends - num_spared, c.max_total_tokens.take(rows) - 1)
    for row in np.flatnonzero(ends > c.num_slots.take(rows)).tolist():
        pool.extend_as_far_as_possible(step.states[row], int(num_useful[row]))


def victims(pool: RequestPool, state: RequestState, policy: str, *, has_seat: bool) -> list[RequestState]:
    """Requests that a waiting one may preempt, in this order, until it has a seat and blocks."""
    if policy == "fair":
        return _beyond_share(pool, state)
    if policy == "priority" and has_seat:
        return [seated for seated in reversed(pool.seated()) if seated.key[0] > state.key[0]]
    return []


def _beyond_share(pool: RequestPool, state: RequestState) -> list[RequestState]:
    """Requests of clients that have more than an equal share of all that hold a seat, the latest first.

    Empty unless the client of the waiting request has no seat: others give up just enough for all to have one.
    """
    if pool.num_seats[state.client]:
        return []
    share = max((pool.num_seats.total() + 1) // (len(pool.num_seats) + 1), 1)
    left, found = Counter(pool.num_seats), list[RequestState]()
    for seated in reversed(pool.seated()):
        if left[seated.client] > share:
            left[seated.client] -= 1
            found.append(seated)
    return found


def max_num_drafts(limits: SchedulerConfig, pool: RequestPool) -> int:
    """How many drafts each may have in a step that all share who have a seat or wait for a free one."""
    num_seated = pool.max_num_seqs - pool.num_free_seats
    num_requests = num_seated + min(len(pool.waiting), pool.num_free_seats)
    return limits.rows_of_request(max(num_requests, 1)) - 1
