"""Drafts of some requests under any method, as of a grammar or a prediction; the method's drafts follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.proposer import DraftRequest, PerRequestMethod, ProposeInput
from fastdeploy_sd.types import I32, DraftTokens


class PerRequestDrafts:
    """Asks partial methods, one after the other, for the rows that they serve; each has its own guard."""

    def __init__(self, methods: Sequence[PerRequestMethod], max_num_seqs: int) -> None:
        self._methods = list(methods)
        self._guards = [DraftGuard(method.proposer, method.source) for method in methods]
        # bool[methods, max_num_seqs]: rows that were begun, and those of them that are asked for here.
        self._served, self._asked = np.zeros((2, len(self._methods), max_num_seqs), np.bool_)
        self._num_served = self._num_asked = 0

    def begin(self, requests: Sequence[DraftRequest], chooses: Sequence[bool]) -> None:
        """Begin every request in the methods that serve it; where its method `chooses`, it gets only certain drafts."""
        for method, guard, served, asked in zip(self._methods, self._guards, self._served, self._asked, strict=True):
            own = [
                (request, choice) for request, choice in zip(requests, chooses, strict=True) if method.serves(request)
            ]
            if own:
                guard.begin([request for request, _ in own])
                served[[request.table_row for request, _ in own]] = True
                asked[[request.table_row for request, choice in own if method.is_certain or not choice]] = True
                self._count()

    @property
    def is_idle(self) -> bool:
        """Whether no source serves a request that was begun."""
        return self._num_asked == 0

    def propose(self, x: ProposeInput) -> DraftTokens | None:
        """Return the partial methods' drafts for all rows, with their sources; None = no source serves any row."""
        if self._num_asked == 0:
            return None
        num_rows, head = len(x.table_rows), None
        for guard, asked in zip(self._guards, self._asked, strict=True):
            rows = np.flatnonzero(asked.take(x.table_rows))
            if len(rows) == 0:
                continue
            found = guard.propose(after_drafts(x, head).select(rows))
            parts = [(rows, found)] if head is None else [(np.arange(num_rows), head), (rows, found)]
            head = DraftTokens.merge(num_rows, parts)
        return head

    def forget(self, table_rows: I32) -> None:
        if self._num_served == 0:
            return
        for guard, served in zip(self._guards, self._served, strict=True):
            own = table_rows[served[table_rows]]
            if len(own):
                guard.forget(own)
                served[own] = False
        self._asked[:, table_rows] = False
        self._count()

    def _count(self) -> None:
        self._num_served, self._num_asked = int(self._served.sum()), int(self._asked.sum())

    def close(self) -> None:
        for guard in self._guards:
            guard.close()


def after_drafts(x: ProposeInput, head: DraftTokens | None) -> ProposeInput:
    """Return the input of a method that drafts after `head`, the drafts of all rows; None = no drafts."""
    if head is None:
        return x
    room = (x.max_draft_len - np.diff(head.cu_num_draft)).astype(np.int32)
    return replace(x, max_draft_len=room, prefix=head)


def joined(num_rows: int, head: DraftTokens, is_before: npt.NDArray[np.bool_], tail: DraftTokens) -> DraftTokens:
    """Return the drafts of all rows: `head` then `tail` where bool[R] `is_before`, else `tail` alone."""
    rows = np.flatnonzero(is_before)
    return DraftTokens.merge(num_rows, [(rows, head.take(rows)), (np.arange(num_rows), tail)])
