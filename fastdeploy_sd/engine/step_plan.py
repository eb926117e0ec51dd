"""A step under construction: the rows chosen so far and the token budget left. Knows no queue and no blocks' owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.types import I32, DraftTokens, NewRequest, RequestDelta, RequestId, SchedulerOutput


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

    def build(self, step_id: int, max_draft_tokens: int, finished_ids: tuple[RequestId, ...]) -> SchedulerOutput:
        """Turn the rows into arrays and note in each state which blocks the executor knows from now on.

        Args:
            max_draft_tokens: limit of drafts per request in the next step.
            finished_ids: requests whose state the executor must drop first.
        """
        states = self.states
        new, deltas = self._block_changes()
        num_computed = np.array([state.num_computed_tokens for state in states], np.int32)
        num_new, num_draft = np.array(self.num_new, np.int32), np.array(self.num_draft, np.int32)
        return SchedulerOutput(
            step_id=step_id,
            request_ids=tuple([state.request_id for state in states]),
            new=tuple(new),
            deltas=tuple(deltas),
            num_computed_tokens=num_computed,
            num_new_tokens=num_new,
            draft=self._drafts(),
            max_draft_len=self._max_draft_lens(max_draft_tokens, num_computed + num_new - num_draft),
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

    def _drafts(self) -> DraftTokens:
        if not any(self.num_draft):
            return DraftTokens.none(len(self.states))
        token_ids: list[int] = []
        for state, num_draft in zip(self.states, self.num_draft, strict=True):
            token_ids += state.drafts[:num_draft]
        cu_num_draft = np.zeros(len(self.states) + 1, np.int32)
        np.cumsum(self.num_draft, out=cu_num_draft[1:])
        return DraftTokens(np.array(token_ids, np.int32), cu_num_draft)

    def _max_draft_lens(self, max_draft_tokens: int, num_computed_after: I32) -> I32:
        """Per row: 0 while tokens are left to compute, else what may still follow one more committed token.

        After this step a request has at least num_tokens + 1 tokens; the drafts that follow leave room for the one
        token that verification always adds:

            [0 .. num_tokens) [one output] [drafts ........) [recovered or bonus]   <= max_total_tokens

        More outputs may be committed than one; the commit then cuts the drafts. The model's length is no separate
        limit, as max_total_tokens respects it.

        Args:
            num_computed_after: i32[R], committed tokens that will have KV after this step.
        """
        if max_draft_tokens == 0:
            return np.zeros(len(self.states), np.int32)
        num_tokens = np.array([state.num_tokens for state in self.states], np.int32)
        room = np.array([state.max_total_tokens for state in self.states], np.int32) - num_tokens - 2
        return np.where(num_computed_after == num_tokens, room.clip(0, max_draft_tokens), 0).astype(np.int32)
