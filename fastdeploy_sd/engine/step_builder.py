"""A step under construction: the rows chosen so far and the token budget left. Knows no queue and no blocks' owners."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import numpy as np

from fastdeploy_sd.engine.prompt_budget import PromptBudget
from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.types import I32, Rows

# Fewer rows are handled faster one by one than together: with cold caches a NumPy call takes as long as
# several of them.
_MANY_ROWS = 48


class StepBuilder:
    """Rows of the next step: first of running requests, chosen together, then of those that were admitted.

    Attributes:
        states: the requests, one per row. counter_rows: intp[R], theirs of the counters.
        num_new: tokens each row runs, its drafts included. num_draft: drafts at its end. Lists; see `result_rules`.
        budget: tokens that may still be added.
        preempted: requests that lost their blocks for this step; they are not admitted again in it.
        shorter: waiting requests for which `share_prompts` has kept room.
    """

    def __init__(
        self,
        budget: int,
        states: list[RequestState],
        counter_rows: Rows,
        num_new: list[int],
        num_draft: list[int],
        prompt_budget: int | None = None,
    ) -> None:
        """Begin with what all running requests want; less than no `budget` is left if that is too much."""
        self.states, self.counter_rows, self.num_new, self.num_draft = states, counter_rows, num_new, num_draft
        self.budget = budget - sum(num_new)
        self._prompt_budget = budget if prompt_budget is None else prompt_budget
        self.preempted: list[RequestState] = []
        self.shorter: list[RequestState] = []

    def room_for(self, num_tokens: int) -> int:
        """How many of a request's next tokens find room: one is a decoding request's, more are of a prompt."""
        return self.budget if num_tokens == 1 else min(self.budget, self._prompt_budget)

    def share_prompts(self, prompts: PromptBudget, waiting: Sequence[RequestState]) -> None:
        """Cut the rows of prompts to what there is for them, and take out those that get nothing.

        `waiting` are requests that may be admitted, shortest first.
        """
        num_own = list(map(sub, self.num_new, self.num_draft))
        rows = [row for row, count in enumerate(num_own) if count > 1]
        wanted = [num_own[row] for row in rows]
        room = max(min(self._prompt_budget, self.budget + sum(self.num_new[row] for row in rows)), 0)
        self.shorter, num_reserved = prompts.shorter(waiting, wanted, room)
        self.budget += sum(self.num_new)
        for row, share in zip(rows, prompts.divide(wanted, room, num_reserved), strict=True):
            self._prompt_budget -= share
            if share < num_own[row]:
                self.num_new[row], self.num_draft[row] = share, 0
        kept = [row for row, count in enumerate(self.num_new) if count]
        if len(kept) < len(self.num_new):
            self.counter_rows = self.counter_rows[kept]
            self.states[:] = [self.states[row] for row in kept]
            self.num_new[:] = [self.num_new[row] for row in kept]
            self.num_draft[:] = [self.num_draft[row] for row in kept]
        self.budget -= sum(self.num_new)

    def cut_to_budget(self) -> None:
        """Leave every row what those before it leave, its own tokens before its drafts, and drop rows left without."""
        left = self.budget + sum(self.num_new)
        num_rows = 0
        while left > 0:
            num_own = min(self.num_new[num_rows] - self.num_draft[num_rows], left)
            self.num_draft[num_rows] = min(self.num_draft[num_rows], left - num_own)
            self.num_new[num_rows] = num_own + self.num_draft[num_rows]
            left -= self.num_new[num_rows]
            num_rows += 1
        self.budget = 0
        self.counter_rows = self.counter_rows[:num_rows]
        del self.states[num_rows:], self.num_new[num_rows:], self.num_draft[num_rows:]

    def add(self, state: RequestState, num_own: int, num_draft: int) -> None:
        """Add the row of a request that was just started; its drafts came with its KV."""
        self.budget -= num_own + num_draft
        self._prompt_budget -= num_own if num_own > 1 else 0
        self.states.append(state)
        self.counter_rows = np.append(self.counter_rows, state.counter_row)
        self.num_new.append(num_own + num_draft)
        self.num_draft.append(num_draft)

    def remove(self, state: RequestState) -> None:
        """Take a request's row back, if it has one, and its tokens into the budget."""
        if state not in self.states:
            return
        row = self.states.index(state)
        self.budget += self.num_new[row]
        num_own = self.num_new[row] - self.num_draft[row]
        self._prompt_budget += num_own if num_own > 1 else 0
        del self.states[row], self.num_new[row], self.num_draft[row]
        self.counter_rows = np.delete(self.counter_rows, row)

    def shorten_drafts(self, row: int, num_draft: int) -> None:
        """Leave a row `num_draft` of its drafts, and give back the budget of the others."""
        num_cut = self.num_draft[row] - num_draft
        self.num_draft[row] = num_draft
        self.num_new[row] -= num_cut
        self.budget += num_cut

    def num_left(self, counters: RequestCounters, max_chunk: int) -> int:
        """How many tokens of unfinished prompts the rows would run next, at most `max_chunk` of each."""
        num_after = counters.num_computed_tokens.take(self.counter_rows) + np.array(self.num_new) - self.num_draft
        left = counters.num_tokens.take(self.counter_rows) - num_after
        return int(np.minimum(left, max_chunk).sum())

    def max_draft_len(self, counters: RequestCounters, most: int) -> I32:
        """How many drafts may follow each row's output, i32[R]: at most `most`, 0 while tokens are left to compute.

        After this step a request has at least num_tokens + 1 tokens; the drafts that follow leave room for the one
        token that verification always adds:

            [0 .. num_tokens) [one output] [drafts ........) [recovered or bonus]   <= max_total_tokens

        More outputs may be committed than one; the executor then lets fewer drafts follow. The model's length is no
        separate limit, as max_total_tokens respects it.
        """
        num_rows = len(self.states)
        if most == 0:
            return np.zeros(num_rows, np.int32)
        num_tokens, num_computed, max_total, lengths = counters.with_limits(self.counter_rows)
        if num_rows < _MANY_ROWS:
            columns = (num_tokens, num_computed, max_total, lengths)
            rows = zip(*(column.tolist() for column in columns), self.num_new, self.num_draft, strict=True)
            allowed = [
                max(min(wanted, total - known - 2, most), 0) if computed + new - drafts == known else 0
                for known, computed, total, wanted, new, drafts in rows
            ]
            return np.array(allowed, np.int32)
        num_own = np.fromiter(map(sub, self.num_new, self.num_draft), np.int32, num_rows)
        max_total -= num_tokens
        max_total -= 2
        np.minimum(lengths, max_total, out=lengths)
        np.minimum(lengths, most, out=lengths)
        np.maximum(lengths, 0, out=lengths)
        num_own += num_computed
        lengths *= num_own == num_tokens
        return lengths
