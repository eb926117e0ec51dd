"""Drives a proposer over recorded conversations as an engine would, and counts what verification would have kept.

    step 0     prompt            -> first token of the response, no drafts
    step i     committed + drafts -> the drafts the response continues with, and one token more

Conversations run side by side in the order of the recording; the responses of one follow each other. Time and memory
are the proposer's own. Knows no method by name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fastdeploy_sd.cli.replay.counts import ReplayCounts
from fastdeploy_sd.cli.replay.recording import Conversation
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import EMPTY_I32, I32


class StepTime(Protocol):
    """What a step takes."""

    def __call__(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> float:
        """The time of a step over `num_rows` tokens of so many requests, with so many tokens in all contexts."""
        ...


@dataclass(slots=True)
class _Row:
    """A response on its way: [begin, end) of the conversation's tokens. `later`: the responses after this one."""

    conversation: Conversation
    table_row: int
    begin: int
    end: int
    num_tokens: int
    later: deque[tuple[int, int]]
    drafts: I32 = field(default_factory=lambda: EMPTY_I32)
    parents: Sequence[int] = ()

    @property
    def request_id(self) -> str:
        return f"{self.conversation.id}/{self.begin}"


class Replay:
    """One run of one proposer over a recording.

    Args:
        proposer: fresh; made for at least `concurrency` table rows and `max_len(conversations)` columns.
        memory_bytes: what the proposer holds now; asked after every step. None = not known.
        on_tokens: told the number of output tokens of each step, for a progress bar.
        step_time: what the verify steps take, added up in the counts; None = not asked for.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_speculative_tokens: int,
        concurrency: int = 1,
        memory_bytes: Callable[[], int] | None = None,
        on_tokens: Callable[[int], object] | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        self._proposer, self._k, self._concurrency = proposer, num_speculative_tokens, concurrency
        self._memory_bytes, self._on_tokens, self._step_time = memory_bytes, on_tokens, step_time
        self._counts = ReplayCounts.empty(num_speculative_tokens)

    def run(self, conversations: Sequence[Conversation]) -> ReplayCounts:
        """Replay all responses and return the counts."""
        self._table = np.zeros((self._concurrency, max_len(conversations)), np.int32)
        waiting = deque(c for c in conversations if c.responses)
        free = list(range(self._concurrency))[::-1]
        rows: list[_Row] = []
        dropped: list[int] = []
        while waiting or rows:
            begun = [self._start(waiting.popleft(), free.pop()) for _ in range(min(len(waiting), len(free)))]
            rows += begun
            self._step(rows, np.array(dropped, np.int32))
            ended = [row for row in rows if row.num_tokens == row.end]
            dropped = [row.table_row for row in ended]
            free += dropped
            rows = [row for row in rows if row.num_tokens < row.end]
            # A conversation goes on with its next response before others get the table row.
            waiting.extendleft(_remaining(row) for row in reversed(ended) if row.later)
        return self._counts

    def _start(self, conversation: Conversation, table_row: int) -> _Row:
        later = deque(conversation.responses)
        begin, end = later.popleft()
        self._table[table_row, :begin] = conversation.token_ids[:begin]
        self._counts.num_responses += 1
        return _Row(conversation, table_row, begin, end, begin, later)

    def _step(self, rows: Sequence[_Row], dropped: I32) -> None:
        begun = [
            DraftRequest(row.request_id, row.table_row, row.begin, row.begin)
            for row in rows
            if row.num_tokens == row.begin
        ]
        start = time.perf_counter_ns()
        self._proposer.forget(dropped)
        self._proposer.begin(begun)
        self._counts.begin_ns += time.perf_counter_ns() - start
        self._add_time(rows)
        num_emitted = sum(self._commit(row) for row in rows)
        self._propose(rows)
        if self._memory_bytes is not None:
            self._counts.peak_memory_bytes = max(self._counts.peak_memory_bytes or 0, self._memory_bytes())
        if self._on_tokens is not None:
            self._on_tokens(num_emitted)

    def _add_time(self, rows: Sequence[_Row]) -> None:
        """Add what verifying takes; a response's first token comes with its prompt, which costs the same anyhow."""
        verified = [row for row in rows if row.num_tokens > row.begin]
        if self._step_time is not None and verified:
            num_rows = sum(1 + len(row.drafts) for row in verified)
            num_kv_tokens = sum(row.num_tokens for row in verified)
            self._counts.verify_time += self._step_time(num_rows, len(verified), num_kv_tokens)

    def _commit(self, row: _Row) -> int:
        """Verify the row's drafts and write its new tokens into the table; return how many these are."""
        rest = row.conversation.token_ids[row.num_tokens : row.end]
        path = _accepted_path(row.drafts.tolist(), row.parents, rest.tolist())
        num_emitted = min(len(path) + 1, len(rest))
        is_first = row.num_tokens == row.begin
        self._counts.record(is_first=is_first, parents=row.parents, path=path, num_emitted=num_emitted)
        self._table[row.table_row, row.num_tokens : row.num_tokens + num_emitted] = rest[:num_emitted]
        row.num_tokens += num_emitted
        return num_emitted

    def _propose(self, rows: Sequence[_Row]) -> None:
        x = ProposeInput(
            request_ids=tuple(row.request_id for row in rows),
            table_rows=np.array([row.table_row for row in rows], np.int32),
            token_table=self._table,
            num_tokens=np.array([row.num_tokens for row in rows], np.int32),
            # A server does not know either that an answer is about to end.
            max_draft_len=np.full(len(rows), self._k, np.int32),
        )
        start = time.perf_counter_ns()
        drafts = self._proposer.propose(x)
        self._counts.propose_ns += time.perf_counter_ns() - start
        self._counts.num_calls += 1
        self._counts.num_rows += len(rows)
        for r, row in enumerate(rows):
            row.drafts, row.parents = drafts.row(r), drafts.parents_of(r)


def max_len(conversations: Sequence[Conversation]) -> int:
    """Columns of the token table that the longest conversation needs."""
    return max(len(c.token_ids) for c in conversations)


def vocab_size(conversations: Sequence[Conversation]) -> int:
    """One more than the largest token id."""
    return 1 + max(int(c.token_ids.max(initial=0)) for c in conversations)


def _remaining(row: _Row) -> Conversation:
    return Conversation(row.conversation.id, row.conversation.token_ids, tuple(row.later))


def _accepted_path(drafts: Sequence[int], parents: Sequence[int], rest: Sequence[int]) -> list[int]:
    """Return the drafts that the text continues with, each following the one before it."""
    path, last = list[int](), -1
    for draft, (token_id, parent) in enumerate(zip(drafts, parents, strict=True)):
        if parent == last and len(path) < len(rest) and token_id == rest[len(path)]:
            path.append(draft)
            last = draft
    return path
