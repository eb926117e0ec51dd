"""The drafts that requests keep for their next step, and how a plan collects them. Knows no budget and no blocks.

A step's result brings the drafts of all its rows in one `DraftTokens`. A request keeps a span of it, not a copy:

    result number 7     [a a a a | b b | c c c]          one DraftTokens, sources and log-probabilities with it
    request b           draft_result = 7, draft_begin = 4, num_drafts = 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.types import DraftSource, DraftTokens, Rows, offsets

_NUM_NUMBERS = 1 << 31  # results are numbered in i32, a server's steps may be more


class PendingDrafts:
    """The results whose drafts may still be used. A row that a step left out keeps an earlier step's drafts;
    `skip_draft_steps`: nothing is drafted after so many of the next steps, if no request starts; see `StepResult`.
    """

    def __init__(self, counters: RequestCounters) -> None:
        self._counters = counters
        self._results: dict[int, DraftTokens] = {}
        self._last = self.skip_draft_steps = 0
        self._none = DraftTokens.none(0)

    def keep(self, rows: Rows, drafts: DraftTokens) -> None:
        """Have rows keep a step's drafts in place of older ones, cut so that one more token fits after them."""
        c, cu_num_draft = self._counters, drafts.cu_num_draft
        if len(drafts.token_ids) == 0:
            if self._results:  # else no row has any
                c.num_drafts[rows] = 0
            return
        number = self._number(drafts)
        for row, (begin, end) in zip(rows.tolist(), pairwise(cu_num_draft.tolist()), strict=True):
            room = max(c.max_total_tokens.item(row) - c.num_tokens.item(row) - 1, 0)
            c.num_drafts[row] = min(end - begin, room)
            c.draft_begin[row] = begin
            c.draft_result[row] = number

    def hand_over(self, row: int, token_ids: Sequence[int]) -> None:
        """Have a request that has none keep drafts which came with its KV, as many as it wants and has room for."""
        c = self._counters
        room = max(c.max_total_tokens.item(row) - c.num_tokens.item(row) - 1, 0)
        num_drafts = min(len(token_ids), c.max_draft_tokens.item(row), room)
        if num_drafts == 0:
            return
        sources = np.full(num_drafts, DraftSource.HANDED_OVER, np.int8)
        drafts = DraftTokens(np.array(token_ids[:num_drafts], np.int32), offsets([num_drafts]), sources)
        c.num_drafts[row], c.draft_begin[row] = num_drafts, 0
        c.draft_result[row] = self._number(drafts)

    def _number(self, drafts: DraftTokens) -> int:
        self._last = (self._last + 1) % _NUM_NUMBERS
        self._results[self._last] = drafts
        return self._last

    def forget_unwanted(self, rows: Rows) -> None:
        """Let go of results from which none of these rows, intp[n], keeps anything."""
        if len(self._results) > 1:
            wanted = set(self._counters.draft_result.take(rows).tolist())
            self._results = {number: drafts for number, drafts in self._results.items() if number in wanted}

    def collect(self, rows: Rows, num_draft: list[int]) -> DraftTokens:
        """Put the first `num_draft[r]` drafts of every row one after the other, with their sources and logprobs."""
        if not any(num_draft):
            return self._none_of(len(rows))
        begins, cu = self._counters.draft_begin.take(rows).tolist(), [0, *accumulate(num_draft)]
        origins = list(self._results.values())
        if len(origins) == 1 and cu == origins[0].cu_num_draft.tolist() and begins == cu[:-1]:
            return origins[0]  # nearly always: the rows of the step before, and all of their drafts
        if len(origins) > 1:
            first = dict(zip(self._results, offsets([len(o.token_ids) for o in origins]).tolist(), strict=False))
            results = self._counters.draft_result.take(rows).tolist()
            begins = [begin + first.get(number, 0) for begin, number in zip(begins, results, strict=True)]
        taken = [i for begin, count in zip(begins, num_draft, strict=True) for i in range(begin, begin + count)]
        return DraftTokens.concat(origins).pick(np.array(taken, np.int32), np.array(cu, np.int32))

    def _none_of(self, num_rows: int) -> DraftTokens:
        """No drafts for so many rows; the same value as long as it is asked for as many."""
        if len(self._none.cu_num_draft) != num_rows + 1:
            self._none = DraftTokens.none(num_rows)
        return self._none
