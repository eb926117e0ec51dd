"""The drafts that requests keep for their next step, and how a plan collects them. Knows no budget and no blocks.

A step's result brings the drafts of all its rows in one `DraftTokens`. A request keeps a span of it, not a copy:

    result number 7     [a a a a | b b | c c c]          one DraftTokens, sources and log-probabilities with it
    request b           draft_result = 7, draft_begin = 4, num_drafts = 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from fastdeploy_sd.engine.columns import RequestColumns, Rows
from fastdeploy_sd.types import I8, I32, DraftTokens, LogprobArrays

_NUM_NUMBERS = 1 << 31  # results are numbered in i32, a server's steps may be more


class PendingDrafts:
    """The results whose drafts somebody may still want. A row that a step left out keeps an earlier step's drafts."""

    def __init__(self, columns: RequestColumns) -> None:
        """Start without drafts; `columns` says who has which."""
        self._columns = columns
        self._results: dict[int, DraftTokens] = {}
        self._last = 0
        self._none = DraftTokens.none(0)

    def keep(self, rows: Rows, drafts: DraftTokens) -> None:
        """Have a step's rows keep its drafts, cut so that one more token fits behind them, in place of older ones.

        Args:
            rows: intp[R], the rows of the step; they have their new tokens already.
            drafts: of the same rows.
        """
        c, cu_num_draft = self._columns, drafts.cu_num_draft
        if len(drafts.token_ids) == 0:
            if self._results:  # else nobody has any
                c.num_drafts[rows] = 0
            return
        self._last = (self._last + 1) % _NUM_NUMBERS
        for row, (begin, end) in zip(rows.tolist(), pairwise(cu_num_draft.tolist()), strict=True):
            room = max(c.max_total_tokens.item(row) - c.num_tokens.item(row) - 1, 0)
            c.num_drafts[row] = min(end - begin, room)
            c.draft_begin[row] = begin
            c.draft_result[row] = self._last
        self._results[self._last] = drafts

    def forget_unwanted(self, rows: Rows) -> None:
        """Let go of results from which none of these rows, intp[n], keeps anything."""
        if len(self._results) > 1:
            wanted = set(self._columns.draft_result.take(rows).tolist())
            self._results = {number: drafts for number, drafts in self._results.items() if number in wanted}

    def collect(self, rows: Rows, num_draft: list[int]) -> DraftTokens:
        """Put the first `num_draft[r]` drafts of every row behind each other, with their sources and logprobs."""
        if not any(num_draft):
            return self._none_of(len(rows))
        begins = self._columns.draft_begin.take(rows).tolist()
        origins = list(self._results.values())
        if len(origins) > 1:
            first = dict(zip(self._results, _starts(origins), strict=True))
            results = self._columns.draft_result.take(rows).tolist()
            begins = [begin + first.get(number, 0) for begin, number in zip(begins, results, strict=True)]
        all_drafts = _concatenate(origins)
        taken = [i for begin, count in zip(begins, num_draft, strict=True) for i in range(begin, begin + count)]
        index, cu_num_draft = np.array(taken, np.int32), np.array([0, *accumulate(num_draft)], np.int32)
        return DraftTokens(
            all_drafts.token_ids[index],
            cu_num_draft,
            None if all_drafts.sources is None else all_drafts.sources[index],
            None if all_drafts.logprobs is None else _take(all_drafts.logprobs, index),
        )

    def _none_of(self, num_rows: int) -> DraftTokens:
        """No drafts for so many rows; the same value as long as it is asked for as many."""
        if len(self._none.cu_num_draft) != num_rows + 1:
            self._none = DraftTokens.none(num_rows)
        return self._none


def _starts(origins: Sequence[DraftTokens]) -> list[int]:
    """Where each one's drafts begin in their concatenation."""
    ends = np.cumsum([len(origin.token_ids) for origin in origins])
    return [0, *ends[:-1].tolist()]


def _concatenate(origins: Sequence[DraftTokens]) -> DraftTokens:
    """One DraftTokens with the drafts of all; its rows mean nothing."""
    if len(origins) == 1:
        return origins[0]
    sources: I8 | None = None
    if any(origin.sources is not None for origin in origins):
        sources = np.concatenate([_sources(origin) for origin in origins])
    return DraftTokens(
        np.concatenate([origin.token_ids for origin in origins]),
        np.zeros(1, np.int32),
        sources,
        _concatenate_logprobs(origins),
    )


def _sources(drafts: DraftTokens) -> I8:
    return np.zeros(len(drafts.token_ids), np.int8) if drafts.sources is None else drafts.sources


def _concatenate_logprobs(origins: Sequence[DraftTokens]) -> LogprobArrays | None:
    """Log-probabilities over the drafts of all, with as many alternatives as the widest; NaN where there are none."""
    if all(origin.logprobs is None for origin in origins):
        return None
    num_drafts = sum(len(origin.token_ids) for origin in origins)
    width = max(o.logprobs.top_token_ids.shape[1] for o in origins if o.logprobs is not None)
    merged = LogprobArrays(
        np.full(num_drafts, np.nan, np.float32),
        np.zeros(num_drafts, np.int32),
        np.zeros((num_drafts, width), np.int32),
        np.full((num_drafts, width), np.nan, np.float32),
    )
    for begin, origin in zip(_starts(origins), origins, strict=True):
        if origin.logprobs is not None:
            end, columns = begin + len(origin.token_ids), origin.logprobs.top_token_ids.shape[1]
            merged.logprobs[begin:end] = origin.logprobs.logprobs
            merged.ranks[begin:end] = origin.logprobs.ranks
            merged.top_token_ids[begin:end, :columns] = origin.logprobs.top_token_ids
            merged.top_logprobs[begin:end, :columns] = origin.logprobs.top_logprobs
    return merged


def _take(arrays: LogprobArrays, index: I32) -> LogprobArrays:
    return LogprobArrays(
        arrays.logprobs[index], arrays.ranks[index], arrays.top_token_ids[index], arrays.top_logprobs[index]
    )
