"""The numbers of a RequestPool at one moment. Changes nothing."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.engine.requests.request_pool import RequestPool
from fastdeploy_sd.types.stats import EngineStats


def snapshot_of(pool: RequestPool) -> EngineStats:
    """Counters, histograms and gauges of this moment. O(requests)."""
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
        max_num_seqs=pool.max_num_seqs,
        block_size=pool.kv.block_size,
        num_blocks=pool.kv.num_blocks,
        num_free_blocks=pool.kv.num_free_blocks,
        num_cached_blocks=pool.kv.num_cached_blocks,
    )
