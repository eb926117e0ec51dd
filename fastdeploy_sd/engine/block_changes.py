"""Whose blocks have changed since the executor was last told. Knows no group and no plan."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.types import NewRequest, RequestDelta, RequestId


class BlockChanges:
    """Running requests that got blocks, or lost them."""

    def __init__(self) -> None:
        self._resized: dict[RequestId, RequestState] = {}

    def note(self, state: RequestState) -> None:
        """Note a change of a request's blocks."""
        self._resized[state.request_id] = state

    def take(self) -> tuple[tuple[NewRequest, ...], tuple[RequestDelta, ...]]:
        """Requests the executor does not know, and blocks it does not, since the last call; then it counts as told."""
        new: list[NewRequest] = []
        deltas: list[RequestDelta] = []
        for state in self._resized.values():
            num_sent, block_ids = state.num_sent_blocks, state.table.block_ids
            state.num_sent_blocks = len(block_ids)
            if num_sent == len(block_ids):
                continue  # preempted, ended, or no block was left
            if num_sent:
                deltas.append(RequestDelta(state.request_id, tuple(block_ids[num_sent:])))
            else:
                token_ids = np.array(state.token_ids, np.int32)
                is_ahead = state.arrival is not None and state.arrival.is_draft_ahead
                new.append(NewRequest(state.request, token_ids, state.num_prompt_tokens, tuple(block_ids), is_ahead))
        self._resized.clear()
        return tuple(new), tuple(deltas)
