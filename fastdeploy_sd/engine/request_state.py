"""What the scheduler knows of one request between steps. Knows no blocks' owners, no plan and no executor."""

from __future__ import annotations

import enum

import numpy as np

from fastdeploy_sd.engine.stopping import StopRule
from fastdeploy_sd.kvcache.manager import BlockTable
from fastdeploy_sd.types import FinishReason, Request, RequestMetrics, RequestOutput, TokenLogprob

_GROWTH_TOKENS = 256


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
        drafts: guesses to judge in the next step, never past max_total_tokens - 1.
        max_total_tokens: prompt + max_tokens.
        num_sent_blocks: leading blocks of the table that the executor knows.
        num_cached_tokens: prompt tokens that came from the prefix cache at the first admission.
        arrival_time, first_scheduled_time, first_token_time: seconds since the epoch, 0.0 = has not happened.
    """

    __slots__ = (
        "arrival_time",
        "drafts",
        "first_scheduled_time",
        "first_token_time",
        "key",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_blocks",
        "num_tokens",
        "request",
        "request_id",
        "status",
        "stop_rule",
        "table",
        "token_ids",
    )

    def __init__(self, request: Request, key: tuple[int, int], now: float) -> None:
        """Start a request that has just been submitted.

        Args:
            key: see the class.
            now: seconds since the epoch; the arrival, if the request does not say.
        """
        self.request = request
        self.request_id = request.request_id
        self.key = key
        self.status = RequestStatus.WAITING
        self.stop_rule = StopRule.of(request)
        self.table = BlockTable(request.request_id, request.cache_salt)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + request.max_tokens
        self.token_ids = np.array(request.prompt_token_ids, np.int32)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.drafts: list[int] = []
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
        self.token_ids[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def reset_progress(self) -> None:
        """Go back to the queue without KV: every committed token will be computed again."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_sent_blocks = 0
        self.drafts = []
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
        assert self.num_tokens + len(self.drafts) < self.max_total_tokens, f"{name}: drafts past max_tokens"
        assert not self.drafts or self.num_computed_tokens == self.num_tokens - 1, f"{name}: drafts in a prompt"

    def check_waiting(self) -> None:
        """Verify what holds between steps for a request in the queue.

        Raises:
            AssertionError: naming the request and the broken rule.
        """
        name = f"request {self.request_id}"
        assert self.status is RequestStatus.WAITING, f"{name} is {self.status} among the waiting"
        assert not self.table.block_ids, f"{name} waits and holds blocks"
        assert self.num_computed_tokens == 0, f"{name} waits with computed tokens"
        assert not self.drafts, f"{name} waits with drafts"

    def metrics(self, now: float) -> RequestMetrics:
        """Times of a request that ends now (seconds since the epoch)."""
        return RequestMetrics(
            self.arrival_time, self.first_scheduled_time, self.first_token_time, now, self.num_preemptions
        )

    def output(self, token_ids: list[int], logprobs: tuple[TokenLogprob, ...] | None) -> RequestOutput:
        """An output after which the request goes on."""
        return RequestOutput(self.request_id, tuple(token_ids), logprobs, num_cached_tokens=self.num_cached_tokens)

    def last_output(
        self,
        reason: FinishReason,
        now: float,
        token_ids: list[int] | None = None,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        *,
        stop_reason: int | None = None,
        error: tuple[str, str] | None = None,
    ) -> RequestOutput:
        """The output that ends the request; see `RequestOutput` for the fields."""
        return RequestOutput(
            self.request_id,
            tuple(token_ids or ()),
            logprobs,
            reason,
            stop_reason,
            self.num_cached_tokens,
            error,
            self.metrics(now),
        )
