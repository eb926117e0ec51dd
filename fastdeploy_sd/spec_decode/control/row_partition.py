"""Splits a step's rows for a model source: rows that the controller chooses for, and rows that chose the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fastdeploy_sd.spec_decode.control.model_draft_source import ModelDraftSource
from fastdeploy_sd.spec_decode.control.profile import DraftSample
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput
from fastdeploy_sd.types import F32, I32, DraftTokens, Rows
from fastdeploy_sd.types.draft_methods import DraftMethod

# Of a table row: no request is here; the controller chooses its drafts; the request chose the source.
_FREE, _CHOSEN_HERE, _FORCED = 0, 1, 2
_NO_ROWS = np.zeros(0, np.intp)


class RowPartition:
    """Splits steps: `propose` drafts for a whole step in one call, and the controller may call `draft` in it."""

    def __init__(self, source: ModelDraftSource, method: DraftMethod, max_num_seqs: int) -> None:
        assert method.source is not None, "a method that drafts"
        self.source, self._method, self._draft_source = source, method, int(method.source)
        self._kinds = np.zeros(max_num_seqs, np.int8)
        self._step: ProposeInput | None = None
        self._own: Rows | None = None
        self._forced = _NO_ROWS
        self._forced_drafts: DraftTokens | None = None

    def take_costs(self, samples: Sequence[DraftSample]) -> None:
        self.source.cost.take([sample for sample in samples if sample.method == self._method.name])

    def begin(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Begin all of them; returns those that did not choose the source."""
        self.source.begin(requests)
        own = [request for request in requests if request.method != self._method.name]
        self._kinds[[request.table_row for request in requests]] = _FORCED
        self._kinds[[request.table_row for request in own]] = _CHOSEN_HERE
        return own

    def forget(self, table_rows: I32) -> I32:
        """Forget those that were begun; returns the rows that did not choose the source."""
        own: I32 = table_rows[self._kinds[table_rows] == _CHOSEN_HERE]
        self.source.forget(table_rows)
        self._kinds[table_rows] = _FREE
        return own

    def max_skip_steps(self, x: ProposeInput) -> int:
        """Steps that may be skipped, if they bring each row of x one token."""
        return 0 if len(self._forced) else self.source.num_steps_until_due(x)

    def propose(self, x: ProposeInput, choose: Callable[[ProposeInput], DraftTokens]) -> DraftTokens:
        """Return the drafts of a whole step; `choose` drafts for rows that did not choose the source."""
        kinds = self._kinds.take(x.table_rows)
        self._step, self._forced_drafts = x, None
        if kinds.tolist().count(_CHOSEN_HERE) == len(kinds):
            self._own, self._forced = None, _NO_ROWS
            own = choose(x)
            if self._forced_drafts is None:
                self.source.keep_up(x)
            return own
        self._own, self._forced = np.flatnonzero(kinds == _CHOSEN_HERE), np.flatnonzero(kinds == _FORCED)
        own = choose(x.select(self._own)) if len(self._own) else DraftTokens.none(0)
        if self._forced_drafts is None:
            self.draft(np.zeros(len(self._own), np.int32), 0.0)
        assert self._forced_drafts is not None, "draft leaves them"
        sources = np.full(len(self._forced_drafts.token_ids), self._draft_source, np.int8)
        forced = replace(self._forced_drafts, sources=sources)
        parts = [(self._own, own), (self._forced, forced)]
        if x.prefix is not None:
            parts.insert(0, (self._forced, x.prefix.take(self._forced)))
        return DraftTokens.merge(len(kinds), parts)

    def draft(self, wanted: I32, min_survival: float) -> tuple[DraftTokens, F32]:
        """Return `wanted` i32[R] drafts at most for rows that did not choose the source, and each one's probability."""
        x = self._step
        assert x is not None, "only within a step"
        if self._own is None:
            if not wanted.any():  # `propose` sees to the KV
                return DraftTokens.none(len(wanted)), np.zeros(0, np.float32)
            self._forced_drafts = DraftTokens.none(0)
            return self.source.draft(x, wanted, np.full(len(wanted), min_survival, np.float32))
        limits, least = np.zeros(len(x.table_rows), np.int32), np.zeros(len(x.table_rows), np.float32)
        limits[self._own], least[self._own] = wanted, min_survival
        limits[self._forced] = self.source.limits(x)[self._forced]
        if not limits.any():
            self.source.keep_up(x)
            self._forced_drafts = DraftTokens.none(len(self._forced))
            return DraftTokens.none(len(self._own)), np.zeros(0, np.float32)
        drafts, draft_prob = self.source.draft(x, limits, least)
        self._forced_drafts = drafts.take(self._forced)
        cu = drafts.cu_num_draft
        kept = [np.arange(cu[r], cu[r + 1]) for r in self._own.tolist()]
        return drafts.take(self._own), draft_prob[np.concatenate([np.zeros(0, np.intp), *kept])]
