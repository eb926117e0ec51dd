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
            is_known, block_ids, num_blocks = state.table.is_sent, list[int](), list[int]()
            for group in state.table.groups:
                num_blocks.append(len(group.block_ids) - group.num_sent)
                block_ids += group.block_ids[group.num_sent :]
                group.num_sent = len(group.block_ids)
            if not block_ids:
                continue  # preempted, ended, or no block was left
            counts = tuple(num_blocks) if len(num_blocks) > 1 else ()
            if is_known:
                deltas.append(RequestDelta(state.request_id, tuple(block_ids), counts))
            else:
                token_ids = np.array(state.token_ids, np.int32)
                is_ahead = state.arrival is not None and state.arrival.is_draft_ahead
                num_prompt, ids = state.num_prompt_tokens, tuple(block_ids)
                new.append(NewRequest(state.request, token_ids, num_prompt, ids, is_ahead, counts))
        self._resized.clear()
        return tuple(new), tuple(deltas)
