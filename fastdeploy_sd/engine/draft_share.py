"""How many drafts a request may have in a step that others share. Knows no request and no blocks."""

from __future__ import annotations

from fastdeploy_sd.config import SchedulerConfig
from fastdeploy_sd.engine.requests.request_pool import RequestPool


def max_num_drafts(limits: SchedulerConfig, pool: RequestPool) -> int:
    """How many drafts each may have in a step that all share who have a seat or wait for a free one."""
    num_seated = pool.max_num_seqs - pool.num_free_seats
    num_requests = num_seated + min(len(pool.waiting), pool.num_free_seats)
    return limits.rows_of_request(max(num_requests, 1)) - 1
