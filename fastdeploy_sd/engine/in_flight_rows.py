"""The requests in steps in flight. A request keeps the blocks that such a step writes to until the step is over.

A request may end while a step runs that has it: by the token of the step before, or because its client left. That step
still writes to its blocks, so no other request gets them earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.requests.request_state import RequestState


@dataclass(slots=True)
class _Row:
    """In how many steps in flight a request is, and the name that holds its blocks; "" = it has not ended."""

    num_steps: int = 0
    held: str = ""


class InFlightRows:
    """Counts the steps in flight of each request, and holds the blocks of those that end meanwhile."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._rows: dict[RequestState, _Row] = {}
        self._num_held = 0

    def begin(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self._rows.setdefault(state, _Row()).num_steps += 1

    def end(self, states: Sequence[RequestState]) -> None:
        for state in states:
            row = self._rows[state]
            row.num_steps -= 1
            if not row.num_steps:
                del self._rows[state]
                if row.held:
                    self._kv.release(row.held)

    def hold(self, state: RequestState) -> None:
        """Keep the blocks of a request that ends, if a step has it; before they are freed."""
        row = self._rows.get(state)
        if row is not None:
            self._num_held += 1
            row.held = f"ended in flight: {self._num_held}"
            self._kv.hold(row.held, state.table.block_ids)
