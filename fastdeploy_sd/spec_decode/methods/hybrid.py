"""Two methods in sequence: the second one continues the drafts of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens


class HybridProposer:
    """Asks `first`, which may run a model, then lets `rest`, which runs none, use the remaining budget of every row.

    Where `first` drafted nothing, `rest` drafts alone. `rest` gets only table rows that were begun here.
    """

    def __init__(self, first: Proposer, rest: Proposer, max_num_seqs: int) -> None:
        self._first, self._rest = first, rest
        self._begun = np.zeros(max_num_seqs, np.bool_)

    @property
    def num_lookahead_slots(self) -> int:
        return max(self._first.num_lookahead_slots, self._rest.num_lookahead_slots)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._begun[[request.table_row for request in requests]] = True
        self._first.begin(requests)
        self._rest.begin(requests)

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Return the drafts of `first`, each row continued by `rest`, with log-probabilities of NaN if it has none."""
        num_rows = len(x.table_rows)
        every_row = np.arange(num_rows)
        head = self._first.propose(x)
        prefix = head if x.prefix is None else DraftTokens.merge(num_rows, [(every_row, x.prefix), (every_row, head)])
        room = (x.max_draft_len - np.diff(head.cu_num_draft)).astype(np.int32)
        y = replace(x, max_draft_len=room, prefix=prefix, target=None)
        begun = self._begun[x.table_rows]
        rows = every_row if begun.all() else np.flatnonzero(begun)
        tail = self._rest.propose(y if len(rows) == num_rows else y.select(rows))
        if len(tail.token_ids) == 0:
            return head
        return DraftTokens.merge(num_rows, [(every_row, head), (rows, tail)])

    def forget(self, table_rows: I32) -> None:
        self._begun[table_rows] = False
        self._first.forget(table_rows)
        self._rest.forget(table_rows)

    def close(self) -> None:
        self._first.close()
        self._rest.close()
