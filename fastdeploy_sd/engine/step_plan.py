"""A step under construction: the rows chosen so far and the token budget left. Knows no queue and no blocks' owners."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.engine.columns import RequestColumns, Rows
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.types import I32


class StepPlan:
    """Rows of the next step: first of running requests, chosen together, then of those that were admitted.

    Attributes:
        states: the requests, one per row. rows: intp[R], theirs of the columns.
        num_new: i32[R], tokens each row runs, its drafts included. num_draft: i32[R], drafts at its end.
        budget: tokens that may still be added.
        preempted: requests that lost their blocks while this step was planned; they are not admitted again in it.
    """

    def __init__(self, budget: int, states: list[RequestState], rows: Rows, num_new: I32, num_draft: I32) -> None:
        """Plan what all running requests want; less than no `budget` is left if that is too much."""
        self.states, self.rows, self.num_new, self.num_draft = states, rows, num_new, num_draft
        self.budget = budget - int(np.add.reduce(num_new))
        self.preempted: list[RequestState] = []

    def cut_to_budget(self) -> None:
        """Leave every row what those before it leave, its own tokens before its drafts, and drop rows left without."""
        ends = np.add.accumulate(self.num_new, dtype=np.int64)
        left = np.maximum(self.budget + ends[-1] - (ends - self.num_new), 0)
        num_own = np.minimum(self.num_new - self.num_draft, left)
        num_draft = np.minimum(self.num_draft, left - num_own)
        num_rows = int(np.count_nonzero(num_own))
        self.budget = 0
        del self.states[num_rows:]
        self.rows, self.num_draft = self.rows[:num_rows], num_draft[:num_rows].astype(np.int32)
        self.num_new = num_own[:num_rows].astype(np.int32) + self.num_draft

    def add(self, state: RequestState, num_new: int) -> None:
        """Add the row of a request that was just admitted; it has no drafts."""
        self.budget -= num_new
        self.states.append(state)
        self.rows = np.append(self.rows, state.row)
        self.num_new = np.append(self.num_new, np.int32(num_new))
        self.num_draft = np.append(self.num_draft, np.int32(0))

    def remove(self, state: RequestState) -> None:
        """Take a request's row back, if it has one, and its tokens into the budget."""
        if state not in self.states:
            return
        row = self.states.index(state)
        self.budget += int(self.num_new[row])
        del self.states[row]
        self.rows = np.delete(self.rows, row)
        self.num_new, self.num_draft = np.delete(self.num_new, row), np.delete(self.num_draft, row)

    def shorten_drafts(self, row: int, num_draft: int) -> None:
        """Leave a row `num_draft` of its drafts, and give back the budget of the others."""
        num_cut = int(self.num_draft[row]) - num_draft
        self.num_draft[row] = num_draft
        self.num_new[row] -= num_cut
        self.budget += num_cut

    def max_draft_len(self, columns: RequestColumns) -> I32:
        """How many drafts may follow each row's output, i32[R]: 0 while tokens are left to compute.

        After this step a request has at least num_tokens + 1 tokens; the drafts that follow leave room for the one
        token that verification always adds:

            [0 .. num_tokens) [one output] [drafts ........) [recovered or bonus]   <= max_total_tokens

        More outputs may be committed than one; the executor then lets fewer drafts follow. The model's length is no
        separate limit, as max_total_tokens respects it.
        """
        rows, num_tokens = self.rows, columns.num_tokens.take(self.rows)
        room = np.maximum(columns.max_total_tokens.take(rows) - num_tokens - 2, 0)
        is_caught_up = columns.num_computed_tokens.take(rows) + self.num_new - self.num_draft == num_tokens
        lengths: I32 = np.minimum(columns.max_draft_tokens.take(rows), room) * is_caught_up
        return lengths
