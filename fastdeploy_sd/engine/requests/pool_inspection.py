"""The numbers of a RequestPool at one moment, and what holds between two steps. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from fastdeploy_sd.engine.requests.request_pool import RequestPool
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.types.stats import EngineStats


def snapshot_of(pool: RequestPool) -> EngineStats:
    states = pool.kv.states
    return replace(
        pool.stats.snapshot((state.method, state.drafts) for state in pool.states.values()),
        speculation=pool.speculation,
        num_running=len(pool.running) + len(pool.admitted),
        num_waiting_for_kv=sum(not state.is_ready for state in pool.admitted.values()),
        num_waiting=len(pool.waiting) + len(pool.preparing),
        num_waiting_for_grammar=len(pool.preparing),
        grammars=pool.preparing.stats(),
        num_preempted_waiting=sum(state.num_preemptions > 0 for state in pool.waiting),
        num_waiting_tokens=pool.waiting.num_prompt_tokens + pool.preparing.num_prompt_tokens,
        num_running_by_adapter=_by_adapter([*pool.running, *pool.admitted.values()]),
        num_waiting_by_adapter=_by_adapter([*pool.waiting, *pool.preparing]),
        max_num_seqs=pool.max_num_seqs,
        block_size=pool.kv.block_size,
        num_blocks=pool.kv.num_blocks,
        num_free_blocks=pool.kv.num_free_blocks,
        num_cached_blocks=pool.kv.num_cached_blocks,
        num_state_snapshots=0 if states is None else states.num_snapshots,
        num_used_state_snapshots=0 if states is None else states.num_used_snapshots,
    )


def _by_adapter(states: Iterable[RequestState]) -> dict[str, int]:
    return dict(Counter(state.request.adapter.name for state in states if state.request.adapter is not None))


def verify_pool(pool: RequestPool) -> None:
    """Verify what holds between two steps for all requests, and for each. O(tokens and blocks)."""
    pool.kv.check_integrity()
    assert pool.running == sorted(pool.running, key=lambda state: state.key), "running requests out of order"
    assert len(pool.seated()) <= pool.max_num_seqs, f"{len(pool.seated())} requests have a seat"
    assert pool.num_seats == Counter(state.client for state in pool.seated()), "a seat is counted wrongly"
    pool.adapters.verify([state.adapter_slot for state in pool.states.values()])
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
