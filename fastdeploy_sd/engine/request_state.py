"""What the scheduler knows of one request between steps. Knows no blocks' owners, no plan and no executor."""

from __future__ import annotations

import enum

import numpy as np

from fastdeploy_sd.engine.draft_tally import DraftTally
from fastdeploy_sd.engine.stopping import StopRule
from fastdeploy_sd.kvcache.manager import BlockTable
from fastdeploy_sd.types import (
    DraftLogprob,
    DraftTokens,
    Request,
    RequestMetrics,
    RequestOutput,
    SpeculationInfo,
    TokenLogprob,
)

_GROWTH_TOKENS = 256
_NO_DRAFTS = DraftTokens.none(0)


class RequestStatus(enum.Enum):
    """WAITING: queued, no blocks, unknown to the executor. RUNNING: has blocks. FINISHED: the last output exists."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class RequestState:
    """One request's tokens and progress; the scheduler changes it.

    A request in its decode loop, with two drafts that are judged next:

        token_ids   p p p p p p o o o .  .            p prompt, o output; committed, num_tokens = 9
        drafts                        d  d
        KV cache    [0 ............ 8)                num_computed_tokens = 8 = num_tokens - 1
        next step                   [8 ... 11)        the last output and the drafts

    Attributes:
        key: (priority or 0, order of arrival); lower runs first, higher is preempted first.
        token_ids: i32[capacity], committed tokens in the first num_tokens entries.
        num_computed_tokens: committed tokens whose KV is in the request's blocks.
        max_total_tokens: prompt + max_tokens.
        method: who drafts for it, resolved.
        max_draft_tokens: drafts per step at most, 0 = none are wanted.
        num_lookahead_slots: KV slots from the newest token on that drafting writes; 0 = its method keeps no KV.
        num_drafts: drafts to judge in the next step, never past max_total_tokens - 1: those of `draft_origin`, the
            drafts of the whole step they were made in, from `draft_begin` on.
        tally: how its verifications came out.
        num_sent_blocks: leading blocks of the table that the executor knows.
        num_cached_tokens: prompt tokens that came from the prefix cache at the first admission.
        arrival_time, first_scheduled_time, first_token_time: seconds since the epoch, 0.0 = has not happened.
    """

    __slots__ = (
        "arrival_time",
        "draft_begin",
        "draft_origin",
        "first_scheduled_time",
        "first_token_time",
        "key",
        "max_draft_tokens",
        "max_total_tokens",
        "method",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts",
        "num_lookahead_slots",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_blocks",
        "num_tokens",
        "request",
        "request_id",
        "status",
        "stop_rule",
        "table",
        "tally",
        "token_ids",
    )

    def __init__(self, request: Request, key: tuple[int, int], now: float, speculation: SpeculationInfo) -> None:
        """Start a request that has just been submitted.

        Args:
            key: see the class.
            now: seconds since the epoch; the arrival, if the request does not say.
            speculation: what the server offers; the request's wish was validated against it.
        """
        self.request = request
        self.request_id = request.request_id
        self.key = key
        self.status = RequestStatus.WAITING
        self.stop_rule = StopRule.of(request)
        self.method = speculation.method_of(request.speculation)
        self.max_draft_tokens = _max_draft_tokens(request, self.method, speculation)
        self.num_lookahead_slots = speculation.num_lookahead_slots if self.method == speculation.method else 0
        # Draft layers have KV only in the blocks of requests they draft for, so the two kinds share none. Both prefixes
        # differ in their first letter: no salt of a user turns one kind into the other.
        kind = "with draft KV: " if self.num_lookahead_slots else "target KV only: "
        self.table = BlockTable(request.request_id, kind + request.cache_salt)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + request.max_tokens
        self.token_ids = np.array(request.prompt_token_ids, np.int32)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.drop_drafts()
        self.tally = DraftTally()
        self.num_sent_blocks = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.arrival_time = request.arrival_time or now
        self.first_scheduled_time = 0.0
        self.first_token_time = 0.0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append(self, token_ids: list[int]) -> None:
        """Commit output tokens."""
        end = self.num_tokens + len(token_ids)
        if end > len(self.token_ids):
            capacity = min(self.max_total_tokens, max(2 * len(self.token_ids), end + _GROWTH_TOKENS))
            grown = np.empty(capacity, np.int32)
            grown[: self.num_tokens] = self.token_ids[: self.num_tokens]
            self.token_ids = grown
        if len(token_ids) == 1:  # three times as fast as a slice, and most rows of most steps
            self.token_ids[self.num_tokens] = token_ids[0]
        else:
            self.token_ids[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def keep_drafts(self, origin: DraftTokens, begin: int, end: int) -> None:
        """Keep drafts [begin, end) of a step, cut so that one more token fits behind them."""
        self.draft_origin, self.draft_begin = origin, begin
        room = self.max_total_tokens - self.num_tokens - 1
        self.num_drafts = end - begin if end - begin <= room else room

    def drop_drafts(self) -> None:
        """Have nothing judged in the next step."""
        self.draft_origin, self.draft_begin, self.num_drafts = _NO_DRAFTS, 0, 0

    def reset_progress(self) -> None:
        """Go back to the queue without KV: every committed token will be computed again."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_sent_blocks = 0
        self.drop_drafts()
        self.num_preemptions += 1

    def check_running(self) -> None:
        """Verify what holds between steps for a request with blocks.

        Raises:
            AssertionError: naming the request and the broken rule.
        """
        name = f"request {self.request_id}"
        assert self.status is RequestStatus.RUNNING, f"{name} is {self.status} among the running"
        assert 0 <= self.num_computed_tokens < self.num_tokens, f"{name}: nothing left to compute"
        if self.num_tokens > self.num_prompt_tokens and self.num_preemptions == 0:
            assert self.num_computed_tokens == self.num_tokens - 1, f"{name}: decoding, but not caught up"
        assert self.num_computed_tokens <= self.table.num_slots, f"{name}: computed tokens without a block"
        assert self.num_tokens < self.max_total_tokens, f"{name}: should have ended"
        assert self.num_tokens + self.num_drafts < self.max_total_tokens, f"{name}: drafts past max_tokens"
        assert not self.num_drafts or self.num_computed_tokens == self.num_tokens - 1, f"{name}: drafts in a prompt"
        assert 0 <= self.num_drafts <= self.max_draft_tokens, f"{name}: {self.num_drafts} drafts, not wanted"
        block_size = self.table.num_slots // len(self.table.block_ids)
        # The last token has no KV.
        assert self.table.num_slots - block_size < self.max_total_tokens - 1, f"{name}: a block that no token needs"

    def check_waiting(self) -> None:
        """Verify what holds between steps for a request in the queue.

        Raises:
            AssertionError: naming the request and the broken rule.
        """
        name = f"request {self.request_id}"
        assert self.status is RequestStatus.WAITING, f"{name} is {self.status} among the waiting"
        assert not self.table.block_ids, f"{name} waits and holds blocks"
        assert self.num_computed_tokens == 0, f"{name} waits with computed tokens"
        assert not self.num_drafts, f"{name} waits with drafts"

    def metrics(self, now: float) -> RequestMetrics:
        """Times and counts of a request that ends now (seconds since the epoch)."""
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            now,
            self.num_preemptions,
            self.tally.counts(),
        )

    def output(
        self,
        token_ids: list[int],
        logprobs: tuple[TokenLogprob, ...] | None,
        draft_logprobs: tuple[DraftLogprob, ...] | None,
    ) -> RequestOutput:
        """An output after which the request goes on."""
        return RequestOutput(
            self.request_id,
            tuple(token_ids),
            logprobs,
            num_cached_tokens=self.num_cached_tokens,
            draft_logprobs=draft_logprobs,
        )

    def empty_output(self) -> RequestOutput:
        """An output without tokens, for ends that come between steps or instead of tokens."""
        wanted = self.request.speculation.num_draft_logprobs is not None
        return self.output([], None, () if wanted else None)


def _max_draft_tokens(request: Request, method: str, speculation: SpeculationInfo) -> int:
    if method == "naive":
        return 0
    wanted = request.speculation.num_speculative_tokens
    if wanted is None:
        return speculation.max_draft_tokens
    assert 1 <= wanted <= speculation.max_draft_tokens, f"request {request.request_id}: {wanted} drafts, not validated"
    return wanted
