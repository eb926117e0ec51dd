"""The requests in steps in flight. A request keeps the blocks that such a step writes to until the step is over.

A request may end while a step runs that has it: by the token of the step before, or because its client left. That step
still writes to its blocks, so no other request gets them earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.requests.request_state import RequestState


class InFlightRows:
    """Counts the steps in flight of each request, and holds the blocks of those that end meanwhile."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._num_steps: Counter[RequestState] = Counter()
        self._held: dict[RequestState, str] = {}  # the name that holds the blocks of one that has ended
        self._num_held = 0

    def begin(self, states: Sequence[RequestState]) -> None:
        self._num_steps.update(states)

    def end(self, states: Sequence[RequestState]) -> None:
        self._num_steps.subtract(states)
        for state in states:
            if not self._num_steps[state]:
                del self._num_steps[state]
                if state in self._held:
                    self._kv.release(self._held.pop(state))

    def hold(self, state: RequestState) -> None:
        """Keep the blocks of a request that ends, if a step has it; before they are freed."""
        if state in self._num_steps:
            self._num_held += 1
            self._held[state] = f"ended in flight: {self._num_held}"
            self._kv.hold(self._held[state], state.table.block_ids)
