"""What the scheduler knows of one request between steps. Knows no blocks' owners, no plan and no executor."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable

import numpy as np

from fastdeploy_sd.engine.interfaces.kv_connector import KvArrival
from fastdeploy_sd.engine.kvcache.block_table import BlockTable
from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.engine.stats_recorder import DraftCounter
from fastdeploy_sd.engine.stopping import StopRule
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import (
    F32,
    AdapterSource,
    LogprobArrays,
    PromptLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    SpeculationInfo,
    StepSources,
)
from fastdeploy_sd.types.draft_methods import NAIVE


class RequestStatus(enum.Enum):
    """PREPARING: its grammar is being compiled. WAITING: queued, without blocks. ADMITTED: has a seat and blocks, and
    does not run yet. No executor knows them.

    RUNNING: has a row in steps too, when the budget allows. FINISHED: the last output exists.
    """

    PREPARING = enum.auto()
    WAITING = enum.auto()
    ADMITTED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class RequestState:
    """One request's tokens and progress; the scheduler changes it. What planning reads is in `RequestCounters`.

    A request in its decode loop, with two drafts that are verified next:

        token_ids   p p p p p p o o o .  .            p prompt, o output; committed, num_tokens = 9
        drafts                        d  d
        KV cache    [0 ............ 8)                num_computed_tokens = 8 = num_tokens - 1
        next step                   [8 ... 11)        the last output and the drafts

    Attributes:
        kv_kind: what its blocks hold, see SpeculationInfo.
        key: (priority or 0, order of arrival); lower runs first, higher is preempted first.
        client: whose it is; "" where the policy does not ask.
        adapter: where its adapter is, None = it has none. adapter_slot: the place of it, -1 = it uses none.
        token_ids: the committed tokens; as many as the counter `num_tokens` says.
        end_token_ids: tokens that may end it; whether they do is for its stop rule to say.
        is_text_bound: whether what its next step is given hangs on the text before it, or what it brings on the logits.
        is_ready: whether it may run once it is admitted; else it waits for KV.
        takes_no_kv: some was lost on its way, and it computes all its tokens here.
        arrival: what came for its blocks from elsewhere, None = nothing did.
        num_cached_tokens: prompt tokens that came from the prefix cache at the first admission.
        num_token_steps: steps that gave it tokens here.
        arrival_time, first_scheduled_time, first_token_time: seconds since the epoch, 0.0 = has not happened.
    """

    def __init__(
        self,
        request: Request,
        key: tuple[int, int],
        now: float,
        speculation: SpeculationInfo,
        counters: RequestCounters,
        client: str = "",
    ) -> None:
        """Start a request that has just been submitted; `now`, in epoch seconds, is its arrival if it has none."""
        self.request = request
        self.request_id = request.request_id
        self.key, self.client = key, client
        self.adapter: AdapterSource | None = None
        self.adapter_slot = -1
        self.status = RequestStatus.WAITING
        self.stop_rule = StopRule.of(request)
        self.end_token_ids = self.stop_rule.end_token_ids
        self.method = speculation.method_of(request.speculation)
        draft_model = speculation.draft_model_of(self.method)
        num_lookahead_slots = speculation.num_lookahead_slots if draft_model else 0
        self._keeps_draft_kv = speculation.keeps_draft_kv(self.method)
        self.kv_kind = speculation.kv_kind(self.method)
        self.table = BlockTable(request.request_id, _salt(self.kv_kind, request))
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + request.max_tokens
        self.token_ids = array("i", np.ascontiguousarray(request.prompt_token_ids, np.intc).tobytes())
        self.token_ids.frombytes(np.ascontiguousarray(request.output_token_ids, np.intc).tobytes())
        asked = request.sampling.logprobs, request.sampling.prompt_logprobs, request.speculation.num_draft_logprobs
        has_rows = request.pooling is not None or any(count is not None for count in asked)
        self.has_reports = has_rows or request.speculation.token_sources
        self.embedding: F32 | None = None
        self._prompt_logprobs: list[LogprobArrays] = []
        has_rules = bool(request.grammar or request.bad_words_token_ids or request.sampling.min_tokens)
        self.is_text_bound = has_rules or has_rows
        self.num_cached_tokens = 0
        self.num_preemptions = self.num_token_steps = 0
        self.arrival_time = request.arrival_time or now
        self.first_scheduled_time = 0.0
        self.first_token_time = 0.0
        self.is_ready = self.takes_no_kv = False
        self.arrival: KvArrival | None = None
        self.drafts = DraftCounter()
        self._counters = counters
        self.counter_row = counters.allocate()
        counters.num_tokens[self.counter_row] = len(self.token_ids)
        counters.max_total_tokens[self.counter_row] = self.max_total_tokens
        counters.max_draft_tokens[self.counter_row] = _max_draft_tokens(request, self.method, speculation)
        counters.num_lookahead_slots[self.counter_row] = num_lookahead_slots

    def other_salts(self, kv_kinds: Iterable[str]) -> list[str]:
        """Return the salts that its blocks would have if they were of another kind; none if it takes no KV over."""
        if self.owes_prompt or self.num_preemptions:
            return []
        return [_salt(kind, self.request) for kind in kv_kinds if kind != self.kv_kind]

    @property
    def num_tokens(self) -> int:
        return int(self._counters.num_tokens[self.counter_row])

    @property
    def num_computed_tokens(self) -> int:
        """Committed tokens whose KV is in the request's blocks."""
        return int(self._counters.num_computed_tokens[self.counter_row])

    @property
    def owes_prompt(self) -> bool:
        """Whether every token of the prompt must be computed: its log-probabilities or its embedding go with the first
        output."""
        is_asked = self.request.sampling.prompt_logprobs is not None or self.request.pooling is not None
        return is_asked and self.num_tokens == self.num_prompt_tokens

    def add_prompt_logprobs(self, begin: int, found: LogprobArrays) -> None:
        """Take those of the prompt tokens after position `begin`; tokens that run again replace what they gave."""
        while sum(len(part.logprobs) for part in self._prompt_logprobs) > begin:
            self._prompt_logprobs.pop()
        self._prompt_logprobs.append(found)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return those of the whole prompt, None if the request asks for none; then they are gone."""
        num_top = self.request.sampling.prompt_logprobs
        if num_top is None:
            return None
        parts, self._prompt_logprobs = self._prompt_logprobs, []
        found = LogprobArrays.concat(parts or [LogprobArrays.empty(0, num_top)])
        if len(found.logprobs) != self.num_prompt_tokens - 1:
            got = f"{len(found.logprobs)} of a prompt of {self.num_prompt_tokens} tokens"
            raise InternalError(f"request {self.request_id}: expected log-probabilities of all tokens, got {got}")
        tops = found.top_token_ids[:, :num_top].reshape(-1), found.top_logprobs[:, :num_top].reshape(-1)
        return PromptLogprobs(found.logprobs, found.ranks, *tops)

    @property
    def num_drafts(self) -> int:
        """Drafts that will be verified next, if there is room."""
        return int(self._counters.num_drafts[self.counter_row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def admit(self, num_computed_tokens: int) -> None:
        """Have blocks, with the KV of that many tokens."""
        self.status = RequestStatus.ADMITTED
        self._counters.num_computed_tokens[self.counter_row] = num_computed_tokens

    def take_arrival(self, arrival: KvArrival, block_size: int) -> None:
        """Have KV that came from elsewhere, and be ready; raises InternalError if it cannot have come for it."""
        num_computed, last = self.num_computed_tokens, self.num_tokens - 1
        wanted = ""
        if self.status is not RequestStatus.ADMITTED or self.is_ready:
            wanted = "a request that waits"
        elif not num_computed <= arrival.num_tokens <= last:
            wanted = f"{num_computed} to {last} tokens"
        elif arrival.drafts and arrival.num_tokens != last:
            wanted = "no drafts after tokens that are still to be computed"
        elif self._keeps_draft_kv and arrival.num_tokens % block_size and not arrival.is_draft_ahead:
            wanted = "draft KV of one token more"
        if wanted:
            raise InternalError(f"KV for {self.request_id}: expected {wanted}, got {arrival}")
        self.arrival, self.is_ready = arrival, True
        self._counters.num_computed_tokens[self.counter_row] = arrival.num_tokens

    def go_back(self) -> None:
        """Go back to the queue without blocks, drafts or KV: every committed token will be computed again."""
        self.status = RequestStatus.WAITING
        self._counters.num_computed_tokens[self.counter_row] = self._counters.num_drafts[self.counter_row] = 0
        self.arrival = None
        self.num_preemptions += 1

    def finish(self) -> None:
        self.status = RequestStatus.FINISHED
        self._counters.free(self.counter_row)

    def verify_running(self, block_size: int) -> None:
        name, c, row = f"request {self.request_id}", self._counters, self.counter_row
        self._verify_blocks(block_size)
        num_tokens, num_computed, num_drafts = self.num_tokens, self.num_computed_tokens, self.num_drafts
        max_total = self.max_total_tokens
        assert self.status is RequestStatus.RUNNING, f"{name} is {self.status} among the running"
        num_given = self.num_prompt_tokens + len(self.request.output_token_ids)
        if num_tokens > num_given and self.num_preemptions == 0:
            assert num_computed == num_tokens - 1, f"{name}: decoding, but not caught up"
        assert num_computed <= self.table.num_slots, f"{name}: computed tokens without a block"
        assert num_tokens < max_total, f"{name}: should have ended"
        assert num_tokens + num_drafts < max_total, f"{name}: drafts past max_tokens"
        assert not num_drafts or num_computed == num_tokens - 1, f"{name}: drafts in a prompt"
        assert 0 <= num_drafts <= c.max_draft_tokens[row], f"{name}: {num_drafts} drafts, not wanted"

    def verify_admitted(self, block_size: int, num_admitted_tokens: int) -> None:
        """Verify what holds between steps for a request that has blocks for so many tokens and does not run."""
        name = f"request {self.request_id}"
        self._verify_blocks(block_size)
        assert self.status is RequestStatus.ADMITTED, f"{name} is {self.status} among the admitted"
        assert self.table.num_slots >= num_admitted_tokens, f"{name}: admitted without blocks for its tokens"
        assert not self.num_drafts, f"{name} does not run and has drafts"
        assert not self.table.is_sent, f"{name} does not run and has blocks that the executor knows"

    def _verify_blocks(self, block_size: int) -> None:
        name, num_tokens, num_slots = f"request {self.request_id}", self.num_tokens, self.table.num_slots
        assert len(self.token_ids) == num_tokens, f"{name}: {len(self.token_ids)} tokens, counted {num_tokens}"
        assert 0 <= self.num_computed_tokens < num_tokens, f"{name}: nothing left to compute"
        counted = self._counters.num_slots[self.counter_row]
        assert counted == num_slots, f"{name}: its blocks have {num_slots} slots, counted {counted}"
        # The last token has no KV.
        assert num_slots - block_size < self.max_total_tokens - 1, f"{name}: a block that no token needs"

    def verify_waiting(self) -> None:
        """Verify what holds between steps for a request in the queue, or in front of it."""
        name, c, row = f"request {self.request_id}", self._counters, self.counter_row
        kinds = RequestStatus.WAITING, RequestStatus.PREPARING
        assert self.status in kinds, f"{name} is {self.status} among the waiting"
        assert len(self.token_ids) == self.num_tokens, f"{name}: tokens miscounted"
        assert not self.table.block_ids, f"{name} waits and holds blocks"
        assert self.num_computed_tokens == 0, f"{name} waits with computed tokens"
        assert not c.num_drafts[row], f"{name} waits with drafts"
        assert not c.num_slots[row], f"{name} waits with slots"
        assert not self.table.is_sent, f"{name} waits and has blocks that the executor knows"

    def metrics(self, now: float, gain: float) -> RequestMetrics:
        """Times and counts of a request that ends now (seconds since the epoch); `gain`: see RequestMetrics."""
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            now,
            self.num_preemptions,
            self.drafts.counts(),
            self.num_token_steps,
            self.num_output_tokens - len(self.request.output_token_ids),
            self.drafts.accepted_by_source(),
            gain,
        )

    def empty_output(self) -> RequestOutput:
        """An output without tokens, for ends that come between steps or instead of tokens."""
        wanted = self.request.speculation
        return RequestOutput(
            self.request_id,
            (),
            num_cached_tokens=self.num_cached_tokens,
            draft_logprobs=None if wanted.num_draft_logprobs is None else (),
            sources=StepSources() if wanted.token_sources else None,
        )


def _salt(kv_kind: str, request: Request) -> str:
    # Neither a kind nor a digest has a colon or a comma, so no salt of a user stands for another adapter.
    return f"{kv_kind}, {request.adapter_digest}: {request.cache_salt}"


def _max_draft_tokens(request: Request, method: str, speculation: SpeculationInfo) -> int:
    if method == NAIVE:
        return 0
    wanted = request.speculation.num_speculative_tokens
    if wanted is None:
        return speculation.max_draft_tokens
    assert 1 <= wanted <= speculation.max_draft_tokens, f"request {request.request_id}: {wanted} drafts, not validated"
    return wanted
