"""What an executor has to be told of requests' blocks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.types import NewRequest, RequestDelta


def block_changes(states: Iterable[RequestState]) -> tuple[tuple[NewRequest, ...], tuple[RequestDelta, ...]]:
    """Return the requests among these that it does not know, and their blocks that it does not; then it is told."""
    new: list[NewRequest] = []
    deltas: list[RequestDelta] = []
    for state in states:
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
            given = state.num_prompt_tokens, tuple(block_ids), is_ahead, counts, state.adapter_slot
            new.append(NewRequest(state.request, token_ids, *given))
    return tuple(new), tuple(deltas)
