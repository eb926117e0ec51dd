"""The method `auto` of a server: the policy, told what steps really take, and kept from costing more than it brings.

Where nothing is worth drafting it is not even asked in most steps, so that these cost what plain decoding costs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from fastdeploy_sd.draft_methods import METHODS
from fastdeploy_sd.spec_decode.auto.cost import CostModel
from fastdeploy_sd.spec_decode.auto.dear_rows import DearRows
from fastdeploy_sd.spec_decode.auto.dear_source import DearSource
from fastdeploy_sd.spec_decode.auto.guard import Guard
from fastdeploy_sd.spec_decode.auto.next_step import NextStep
from fastdeploy_sd.spec_decode.auto.offers import NativeMethod
from fastdeploy_sd.spec_decode.auto.policy import Decision
from fastdeploy_sd.spec_decode.auto.proposer import AutoProposer, OfferingMethod
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, ProposerContext
from fastdeploy_sd.types import I32, ChoiceReport, DraftTokens, Judgement

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

logger = logging.getLogger(__name__)

_MAX_NUM_ROWS = 4096
# Where nothing is worth drafting so much of the time may go into asking: where that takes long, most steps rest.
_ASKING_SHARE, _LONGEST_REST = 0.005, 24
# Of steps that nothing is asked in there are none behind two in which nothing was worth drafting, then more each time.
_STEPS_BEHIND_REST = 8
# Where asking takes more than this share of a step, only every fourth plain step is learned from.
_LEARNING_SHARE, _PLAIN_STEPS_PER_LESSON = 0.01, 4
# Steps between two reports, and how many of them must have been asked in: a report takes as long as asking.
_STEPS_PER_REPORT, _ASKED_PER_REPORT = 32, 8
_SECONDS_PER_LOG_LINE = 60.0
_DRAFTS, _LOW_GAIN, _LOAD, _REQUEST, _NO_DRAFTER = "drafts", "low_gain", "load", "request", "no_drafter"
_COMPARISON = "comparison"


class AutoMethod(Proposer):
    """Chooses among the server's methods, by request and step; see AutoPolicy.

    Where draft layers are loaded, it also draws drafts from them for requests that chose that method; see DearRows.

    Args:
        config: `num_speculative_tokens` bounds the drafts of a request and step.
        context: its other methods draft; its board says what steps take.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        drafters = [m for m in METHODS.values() if m.source is not None and not m.needs_model]
        methods = [(m.source, cast(OfferingMethod, context.other_method(m.name))) for m in drafters if m.source]
        self._board, self._times, self._guard = context.board, NextStep(context.board), Guard()
        layers = next(m for m in METHODS.values() if m.needs_model)
        self._dear: DearRows | None = None
        if context.draft_model is not None:
            block_size = context.draft_model.caches[0].block_size
            source = DearSource(context.other_method(layers.name), context.max_num_seqs, block_size)
            self._dear = DearRows(source, layers, context.max_num_seqs)
        self._auto = AutoProposer(
            methods,
            self._times,
            context.max_num_seqs,
            config.num_speculative_tokens,
            None if self._dear is None else layers.source,
            [(m.source, cast(NativeMethod, m.proposer)) for m in context.partial_methods if not m.is_certain],
        )
        if context.board.phase_seconds is not None:
            self._auto.policy.measure(context.board.phase_seconds)
        self._num_steps = dict.fromkeys((_DRAFTS, _LOW_GAIN, _LOAD, _REQUEST, _NO_DRAFTER, _COMPARISON), 0)
        self._choice = _REQUEST
        self._num_plain = self._num_unreported = self._num_asked = self._num_unlearned = 0
        self._predicted_s = self._total_predicted_s = self._total_measured_s = 0.0
        self._asking_s = 0.0  # in the latest step
        self._stretch = 1.0  # how much longer than a plain one the next step is expected to be
        self._is_certain = False  # whether all drafts of the next step are
        self._latest: ProposeInput | None = None
        self._rows: bytes | None = None  # of the latest step; None = requests of the next one began since
        self._num_tokens = 0
        self._next_log = time.monotonic() + _SECONDS_PER_LOG_LINE
        self._board.report = ChoiceReport()

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Begin the requests in every method and in the policy; those that chose the draft layers there only."""
        self._latest = self._rows = None  # another request in the same table row is not the one before it
        if self._dear is not None:
            requests = self._dear.begin(requests)
        self._auto.begin(requests)

    def forget(self, table_rows: I32) -> None:
        """Forget the table rows in every method and in the policy."""
        if self._dear is not None:
            table_rows = self._dear.forget(table_rows)
        self._auto.forget(table_rows)

    @property
    def num_lookahead_slots(self) -> int:
        return 0 if self._dear is None else self._dear.source.num_lookahead_slots

    def close(self) -> None:
        """The methods are the server's, which closes them."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Return the drafts that are worth their time, of whole rows: the prefix, or as much of it, among them.

        A prefix must name its sources, and is taken for certain.
        """
        if self._dear is None:
            return self._propose(x)
        return self._dear.propose(x, self._propose)

    def _propose(self, x: ProposeInput) -> DraftTokens:
        """Draft for rows whose source and number of drafts are ours to choose."""
        begin = time.perf_counter()
        num_kv_tokens = sum(x.num_tokens.tolist())
        is_alone = self._is_alone(x)
        self._observe(x, num_kv_tokens, is_alone=is_alone)
        drafts, choice = self._choose(x, num_kv_tokens)
        self._choice = choice
        self._num_steps[choice] += 1
        self._num_unreported += 1
        self._num_asked += 1
        self._asking_s = time.perf_counter() - begin
        if self._num_unreported >= _STEPS_PER_REPORT and self._num_asked >= _ASKED_PER_REPORT:
            self._report()
        if choice == _DRAFTS:
            self._num_plain //= 2
            self._times.observe_drafting(self._asking_s - self._dear_s)
        elif choice != _COMPARISON and is_alone:
            self._rest(x)
        return drafts

    def _rest(self, x: ProposeInput) -> None:
        """Nothing was worth drafting: leave some steps out, all that may be where asking has not been worth it."""
        self._num_plain += 1
        num_rests = self._longest_rest()
        if self._guard.is_worth_asking(self._board.num_requests):
            num_rests = min(self._num_plain**2 // _STEPS_BEHIND_REST, num_rests)
        self._board.num_rests = num_rests if self._dear is None else min(num_rests, self._dear.num_rests(x))

    def _longest_rest(self) -> int:
        """Steps without asking behind one with, at most."""
        step_s = max(self._board.seconds, 1e-9)
        return min(int(self._asking_s / (_ASKING_SHARE * step_s)), _LONGEST_REST)

    def _is_alone(self, x: ProposeInput) -> bool:
        """Whether the step had these rows only, those of requests that forbid drafts, and no parts of prompts."""
        b = self._board
        return b.num_requests == len(x.table_rows) + b.num_forbidden and b.num_prompt_tokens == 0

    def _choose(self, x: ProposeInput, num_kv_tokens: int) -> tuple[DraftTokens, str]:
        num_requests, num_certain = self._board.num_requests, 0 if x.prefix is None else len(x.prefix.token_ids)
        self._predicted_s, self._stretch, self._is_certain = 0.0, 1.0, False
        if num_certain == 0 and not any(x.max_draft_len.tolist()):
            return DraftTokens.none(len(x.table_rows)), _REQUEST
        least_gain = self._guard.least_gain(num_requests)
        if math.isinf(least_gain):
            reason = _LOW_GAIN if self._guard.is_off(num_requests) else _COMPARISON
            # A comparison needs a plain step: a request that has certain drafts in every step would put it off forever.
            if num_certain == 0 or reason == _COMPARISON:
                return DraftTokens.none(len(x.table_rows)), reason
            # Guesses are not worth it. What is certain is no guess.
            nothing_more = np.zeros(len(x.table_rows), np.int32)
            decision = self._auto.decide(
                replace(x, max_draft_len=nothing_more), num_kv_tokens, num_others=self._num_others(x)
            )
        else:
            decision = self._decide(x, num_kv_tokens, least_gain)
        num_drafts = len(decision.drafts.token_ids)
        self._expect(decision, num_drafts)
        if num_drafts:
            self._is_certain = num_drafts <= num_certain
            return decision.drafts, _DRAFTS
        if math.isinf(least_gain):
            return decision.drafts, reason
        if decision.num_offered == 0:
            return decision.drafts, _NO_DRAFTER
        # The best of drafts brings one token: with so many others in the step that cannot be worth a row.
        return decision.drafts, _LOAD if decision.first_draft_cost >= 1 / num_requests else _LOW_GAIN

    def _expect(self, decision: Decision, num_drafts: int) -> None:
        """Note what the next step is expected to take."""
        self._stretch = decision.time / decision.plain_time
        if self._times.model is not None:
            around_ms = self._times.ms_around(self._board.num_requests, has_drafts=num_drafts > 0)
            self._predicted_s = (decision.time * self._times.model.speed - around_ms) / 1e3

    def _decide(self, x: ProposeInput, num_kv_tokens: int, least_gain: float) -> Decision:
        num_others = self._num_others(x)
        if self._dear is None or self._dear.source.rests():
            return self._auto.decide(x, num_kv_tokens, least_gain, num_others)
        speed = 1.0 if self._times.model is None else self._times.model.speed
        wanted, least = self._auto.ask(x, num_kv_tokens, self._dear.source, speed, num_others)
        drafts, draft_prob = self._dear.draft(wanted, least)
        return self._auto.choose(x, num_kv_tokens, drafts, draft_prob, least_gain, num_others)

    def _num_others(self, x: ProposeInput) -> int:
        """Requests of the step that draft otherwise or not at all, and get a token in any case."""
        return max(self._board.num_requests - len(x.table_rows), 0)

    @property
    def _dear_s(self) -> float:
        """Seconds in which draft layers drafted, so far in this step."""
        return 0.0 if self._dear is None else self._dear.source.seconds

    def _begin_step(self) -> None:
        """Take what was measured when the server started."""
        profile = self._board.profile
        if profile is not None and self._times.model is None:
            self._times.model = CostModel(profile, _MAX_NUM_ROWS)
            if self._dear is not None:
                self._dear.take_costs(profile.drafts)
        if self._dear is not None:
            self._dear.source.seconds = 0.0

    def _observe(self, x: ProposeInput, num_tokens: int, *, is_alone: bool) -> None:
        """Learn from the step that is over.

        Args:
            num_tokens: the sum of x.num_tokens.
            is_alone: see _is_alone.
        """
        b = self._board
        self._begin_step()
        num_rested, b.num_rested = b.num_rested, 0
        if num_rested:
            self._num_steps[self._choice] += num_rested
            self._num_unreported += num_rested
            self._guard.rest(b.num_requests, num_rested)
        num_drafts, num_new = max(0, b.num_tokens - b.num_prompt_tokens - b.num_requests), 0
        if x is self._latest:
            goes_on = True
        else:
            rows = x.table_rows.tobytes()
            goes_on, self._rows, self._latest = rows == self._rows, rows, x
        if is_alone and num_drafts == 0 and goes_on and not self._is_lesson():
            self._guard.note_asked(b.num_requests, self._asking_s)
            self._num_tokens = num_tokens
            return
        if is_alone:
            if self._predicted_s and not num_rested:
                self._total_predicted_s += self._predicted_s
                self._total_measured_s += b.seconds
            self._times.observe(b.num_tokens, num_tokens)
            if goes_on:
                self._times.observe_host(has_drafts=num_drafts > 0)
            if num_rested:
                num_new = b.num_requests  # only the last of these steps is known
            elif goes_on and not self._is_certain:  # what is certain says nothing of guesses
                num_new = num_tokens - self._num_tokens + b.num_forbidden
        self._guard.observe(
            b.num_requests,
            num_new,
            num_drafts,
            b.seconds + self._times.host_s(b.num_requests, has_drafts=num_drafts > 0),
            asking_s=self._asking_s,
            stretch=self._stretch,
        )
        self._num_tokens = num_tokens

    def _is_lesson(self) -> bool:
        """Whether to learn from a plain step that was just like others before it."""
        b = self._board
        if self._asking_s <= _LEARNING_SHARE * b.seconds or not self._guard.knows(b.num_requests):
            return True
        self._num_unlearned = (self._num_unlearned + 1) % _PLAIN_STEPS_PER_LESSON
        return self._num_unlearned == 0

    def _report(self) -> None:
        self._num_unreported = self._num_asked = 0
        reason = "" if self._choice == _DRAFTS else self._choice
        judged = {
            source.name.lower(): Judgement(s.num_scored, s.expected, s.observed, s.squared_error)
            for source, s in self._auto.policy.stats().items()
        }
        self._board.report = ChoiceReport(
            self._guard.gain, reason, dict(self._num_steps), self._total_predicted_s, self._total_measured_s, judged
        )
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _SECONDS_PER_LOG_LINE
            counts = ", ".join(f"{name} {count}" for name, count in self._num_steps.items() if count)
            gain = f"{self._guard.gain:.2f} times plain decoding" if self._guard.gain else "not known yet"
            logger.info("method auto: gain %s; steps by choice: %s", gain, counts)
