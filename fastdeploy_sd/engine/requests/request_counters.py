"""RequestCounters: the numbers of all requests that planning reads, so that a step's arithmetic runs over columns.

Owns the numbers; knows no request, no blocks and no rule about them. What is read one request at a time is in its
RequestState, which has the number of its row here.
"""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import I32, Rows

_FIRST_NUM_ROWS = 64
_NUM_READ, _NUM_WITH_LIMITS = 4, 6  # `read` and `with_limits` return the first columns


class RequestCounters:
    """One row per request, from its arrival to its end; rows of ended requests are given away again.

    The columns, i32[num_rows] each. Growth replaces them: none may be held across `allocate`.

    Attributes:
        num_tokens: committed tokens, prompt included.
        num_computed_tokens: committed tokens whose KV is in the request's blocks.
        num_slots: tokens that fit into its blocks.
        max_total_tokens: prompt + max_tokens.
        max_draft_tokens: drafts per step at most, 0 = none are wanted.
        num_lookahead_slots: KV slots from the newest token on that drafting writes; 0 = its method keeps no KV.
        num_drafts, draft_result, draft_begin: drafts to verify next, and where they are; see `PendingDrafts`.
    """

    num_tokens: I32
    num_computed_tokens: I32
    num_slots: I32
    num_drafts: I32
    max_total_tokens: I32
    max_draft_tokens: I32
    num_lookahead_slots: I32
    draft_result: I32
    draft_begin: I32

    def __init__(self) -> None:
        self._data = np.zeros((len(RequestCounters.__annotations__), 0), np.int32)
        self._free: list[int] = []
        self._grow(_FIRST_NUM_ROWS)

    def allocate(self) -> int:
        """Return a row of zeros."""
        if not self._free:
            self._grow(2 * self._data.shape[1])
        row = self._free.pop()
        self._data[:, row] = 0
        return row

    def free(self, row: int) -> None:
        self._free.append(row)

    def read(self, rows: Rows) -> list[list[int]]:
        """What planning needs of these rows: their num_tokens, num_computed_tokens, num_slots and num_drafts."""
        values: list[list[int]] = self._data[:_NUM_READ].take(rows, axis=1).tolist()
        return values

    def with_limits(self, rows: Rows) -> tuple[I32, I32, I32, I32]:
        """Of these rows num_tokens, num_computed_tokens, max_total_tokens and max_draft_tokens, as copies."""
        found = self._data[:_NUM_WITH_LIMITS].take(rows, axis=1)
        return found[0], found[1], found[4], found[5]

    def _grow(self, num_rows: int) -> None:
        num_known = self._data.shape[1]
        self._data = np.pad(self._data, ((0, 0), (0, num_rows - num_known)))
        self._free = list(range(num_rows - 1, num_known - 1, -1))
        for name, column in zip(RequestCounters.__annotations__, self._data, strict=True):
            setattr(self, name, column)
