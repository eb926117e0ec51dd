"""Which requests lose their place for a waiting one. Knows no blocks and no step."""

from __future__ import annotations

from collections import Counter

from fastdeploy_sd.engine.requests.request_pool import RequestPool
from fastdeploy_sd.engine.requests.request_state import RequestState


def lower_priorities(pool: RequestPool, state: RequestState) -> list[RequestState]:
    """Requests with a seat that are less urgent than a waiting one, the latest first."""
    return [seated for seated in reversed(pool.seated()) if seated.key[0] > state.key[0]]


def beyond_share(pool: RequestPool, state: RequestState) -> list[RequestState]:
    """Requests of clients that have more than an equal share of all that hold a seat, the latest first.

    Empty unless the client of the waiting request has no seat: others give up just enough for everyone to have one.
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
