"""A step under construction: the rows chosen so far and the token budget left. Knows no queue and no blocks' owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastdeploy_sd.engine.pending_drafts import collect_drafts
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.types import I32, NewRequest, RequestDelta, RequestId, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """Rows of the next step; row r is states[r] in every list.

    Attributes:
        budget: tokens that may still be added.
        num_new: tokens each row runs, its drafts included.
        num_draft: drafts at the end of each row.
        preempted: requests that lost their blocks while this step was planned; they are not admitted again in it.
    """

    budget: int
    states: list[RequestState] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    num_draft: list[int] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)

    def add(self, state: RequestState, num_new: int, num_draft: int = 0) -> None:
        """Run `num_new` tokens of a request, the last `num_draft` of them drafts."""
        self.budget -= num_new
        self.states.append(state)
        self.num_new.append(num_new)
        self.num_draft.append(num_draft)

    def remove(self, state: RequestState) -> None:
        """Take a request's row back, if it has one, and its tokens into the budget."""
        if state not in self.states:
            return
        row = self.states.index(state)
        self.budget += self.num_new[row]
        del self.states[row], self.num_new[row], self.num_draft[row]

    def shorten_drafts(self, row: int, num_draft: int) -> None:
        """Leave a row `num_draft` of its drafts, and give back the budget of the others."""
        num_cut = self.num_draft[row] - num_draft
        self.num_draft[row] = num_draft
        self.num_new[row] -= num_cut
        self.budget += num_cut

    def max_draft_lens(self, max_draft_tokens: int) -> I32:
        """How many drafts may follow each row's output, i32[R]: 0 while tokens are left to compute.

        After this step a request has at least num_tokens + 1 tokens; the drafts that follow leave room for the one
        token that verification always adds:

            [0 .. num_tokens) [one output] [drafts ........) [recovered or bonus]   <= max_total_tokens

        More outputs may be committed than one; the executor then lets fewer drafts follow. The model's length is no
        separate limit, as max_total_tokens respects it.

        Args:
            max_draft_tokens: no request wants more.
        """
        if max_draft_tokens == 0:
            return np.zeros(len(self.states), np.int32)
        lengths = []
        for state, num_new, num_draft in zip(self.states, self.num_new, self.num_draft, strict=True):
            length = state.max_draft_tokens
            if state.num_computed_tokens + num_new - num_draft < state.num_tokens:
                length = 0
            elif state.num_tokens + length + 2 > state.max_total_tokens:
                length = max(state.max_total_tokens - state.num_tokens - 2, 0)
            lengths.append(length)
        return np.array(lengths, np.int32)

    def build(self, step_id: int, max_draft_lens: I32, finished_ids: tuple[RequestId, ...]) -> SchedulerOutput:
        """Turn the rows into arrays and note in each state which blocks the executor knows from now on.

        Args:
            max_draft_lens: i32[R], from the method of that name; passed in, as blocks are reserved by it before.
            finished_ids: requests whose state the executor must drop first.
        """
        states = self.states
        new, deltas = self._block_changes()
        return SchedulerOutput(
            step_id=step_id,
            request_ids=tuple([state.request_id for state in states]),
            new=tuple(new),
            deltas=tuple(deltas),
            num_computed_tokens=np.array([state.num_computed_tokens for state in states], np.int32),
            num_new_tokens=np.array(self.num_new, np.int32),
            draft=collect_drafts(states, self.num_draft),
            max_draft_len=max_draft_lens,
            finished_ids=finished_ids,
            preempted_ids=tuple([state.request_id for state in self.preempted]),
        )

    def _block_changes(self) -> tuple[list[NewRequest], list[RequestDelta]]:
        new: list[NewRequest] = []
        deltas: list[RequestDelta] = []
        for state in self.states:
            block_ids = state.table.block_ids
            num_sent = state.num_sent_blocks
            if len(block_ids) == num_sent:
                continue
            state.num_sent_blocks = len(block_ids)
            if num_sent:
                deltas.append(RequestDelta(state.request_id, tuple(block_ids[num_sent:])))
            else:
                token_ids = state.token_ids[: state.num_tokens].copy()
                new.append(NewRequest(state.request, token_ids, state.num_prompt_tokens, tuple(block_ids)))
        return new, deltas
