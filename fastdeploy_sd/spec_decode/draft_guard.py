"""Keeps a failing drafting method from breaking a step: the request continues without drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from fastdeploy_sd.spec_decode.bisection import run_in_parts
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, RequestId

logger = logging.getLogger(__name__)


class DraftGuard:
    """Calls a method. When it raises, finds the failing rows by drafting for the others without them.

    The failing requests get no more drafts. A method that raises must have changed nothing, or have given up the rows
    that it cannot draft for again. So a method that composes others guards each of them. `source`: of its drafts, where
    these do not name one; None = CUSTOM.
    """

    def __init__(self, method: Proposer, source: DraftSource | None = None) -> None:
        self.method = method
        self._source = None if source is None else int(source)
        self._lost: set[int] = set()

    @property
    def num_lookahead_slots(self) -> int:
        return self.method.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Begin all requests, or each by itself where that fails."""
        self._lost.difference_update(request.table_row for request in requests)
        try:
            self.method.begin(requests)
        except Exception:
            logger.exception("beginning to draft for %d requests failed", len(requests))
            for request in requests:
                self._begin_alone(request)

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Return the method's drafts, none for rows that it lost."""
        if self._lost and not self._lost.isdisjoint(x.table_rows.tolist()):
            drafts = self._propose_in_parts(x)
        else:
            try:
                drafts = self.method.propose(x)
            except Exception:
                logger.exception("drafting for %d requests failed; trying them apart", len(x.table_rows))
                drafts = self._propose_in_parts(x)
        if self._source is None or drafts.sources is not None:
            return drafts
        sources = np.empty(len(drafts.token_ids), np.int8)
        sources.fill(self._source)
        return DraftTokens(drafts.token_ids, drafts.cu_num_draft, sources, drafts.logprobs, drafts.parents)

    def give_up(self, request_ids: Sequence[RequestId], table_rows: I32) -> None:
        """Draft no more for these requests: something else than the method failed for them."""
        for request_id, table_row in zip(request_ids, table_rows.tolist(), strict=True):
            self._lose(request_id, table_row)

    def forget(self, table_rows: I32) -> None:
        self._lost.difference_update(table_rows.tolist())
        self._forget(table_rows)

    def close(self) -> None:
        self.method.close()

    def _propose_in_parts(self, x: ProposeInput) -> DraftTokens:
        kept: list[tuple[np.ndarray[tuple[int], np.dtype[np.intp]], DraftTokens]] = []
        for begin, end in self._spans(x):
            for part in run_in_parts(lambda b, e: self.method.propose(x.slice(b, e)), begin, end):
                if part.result is not None:
                    kept.append((np.arange(part.begin, part.end), part.result))
                else:
                    logger.error("drafting for request %s: %r", x.request_ids[part.begin], part.error)
                    self._lose(x.request_ids[part.begin], int(x.table_rows[part.begin]))
        return DraftTokens.merge(len(x.table_rows), kept)

    def _spans(self, x: ProposeInput) -> Iterator[tuple[int, int]]:
        """The longest runs of rows that the method has not lost."""
        begin = 0
        for row, table_row in enumerate([*x.table_rows.tolist(), None]):
            if table_row is None or table_row in self._lost:
                if begin < row:
                    yield begin, row
                begin = row + 1

    def _begin_alone(self, request: DraftRequest) -> None:
        try:
            self._forget(np.array([request.table_row], np.int32))  # it may have been begun before another one failed
            self.method.begin([request])
        except Exception as error:
            logger.error("beginning to draft for request %s: %r", request.request_id, error)
            self._lose(request.request_id, request.table_row)

    def _lose(self, request_id: RequestId, table_row: int) -> None:
        logger.error("request %s goes on without drafts", request_id)
        self._lost.add(table_row)
        self._forget(np.array([table_row], np.int32))

    def _forget(self, table_rows: I32) -> None:
        try:
            self.method.forget(table_rows)
        except Exception:
            logger.exception("forgetting what was kept to draft for table rows %s failed", table_rows.tolist())
