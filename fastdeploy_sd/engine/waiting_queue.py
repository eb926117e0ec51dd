"""Requests that wait for a place, in the order in which they get one. Knows no blocks and no budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fastdeploy_sd.engine.request_state import RequestState


class WaitingQueue:
    """A priority queue by `RequestState.key` with removal; O(log n) each.

    A preempted request keeps its key and so comes back before everyone who arrived later: under FCFS that is the front
    of the queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._alive: dict[str, RequestState] = {}  # entries of the heap that were not removed
        self._num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[RequestState]:
        """The waiting requests, in no particular order."""
        return iter(self._alive.values())

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the waiting requests together."""
        return self._num_prompt_tokens

    def push(self, state: RequestState) -> None:
        """Add a request that is not in the queue."""
        self._alive[state.request_id] = state
        self._num_prompt_tokens += state.num_prompt_tokens
        heapq.heappush(self._heap, (state.key, state))

    def peek(self) -> RequestState | None:
        """The request to admit next, or None."""
        while self._heap:
            state = self._heap[0][1]
            if self._alive.get(state.request_id) is state:
                return state
            heapq.heappop(self._heap)
        return None

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self._alive[state.request_id]
        self._num_prompt_tokens -= state.num_prompt_tokens
        if self._heap[0][1] is state:
            heapq.heappop(self._heap)
        # Otherwise the heap entry dies in place. Rebuilding once the dead outnumber the living keeps removal O(1)
        # amortised and the heap at most twice as long as the queue.
        elif len(self._heap) > 2 * len(self._alive):
            self._heap = [(alive.key, alive) for alive in self._alive.values()]
            heapq.heapify(self._heap)
