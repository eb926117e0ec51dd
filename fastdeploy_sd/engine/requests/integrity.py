"""What holds between two steps for all requests together; RequestState knows what holds for one. Changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdeploy_sd.engine.requests.request_pool import RequestPool


def verify_pool(pool: RequestPool, max_num_seqs: int) -> None:
    """Verify blocks, groups and every request.

    Raises:
        AssertionError: naming the broken rule.
    """
    pool.kv.check_integrity()
    assert pool.running == sorted(pool.running, key=lambda state: state.key), "running requests out of order"
    assert len(pool.seated()) <= max_num_seqs, f"{len(pool.seated())} requests have a seat"
    assert pool.num_seats == Counter(state.client for state in pool.seated()), "a seat is counted wrongly"
    everyone = [*pool.running, *pool.admitted.values(), *pool.waiting, *pool.preparing]
    assert {state.request_id for state in everyone} == set(pool.states), "a request is lost"
    assert len(everyone) == len(pool.states), "a request is in two groups"
    assert len({state.counter_row for state in everyone}) == len(everyone), "two requests share counters"
    assert pool.running_rows.tolist() == [state.counter_row for state in pool.running], "the running rows are outdated"
    running_ids = {state.request_id for state in pool.running}
    assert pool.held.request_ids <= running_ids, "a request is held that does not run"
    for state in pool.running:
        state.verify_running(pool.kv.block_size)
    for state in pool.admitted.values():
        known, num_tokens = state.num_computed_tokens, state.num_tokens
        num_admitted = min(group.admitted_tokens(known, num_tokens) for group in pool.kv.groups)
        state.verify_admitted(pool.kv.block_size, num_admitted)
    for state in (*pool.waiting, *pool.preparing):
        state.verify_waiting()
