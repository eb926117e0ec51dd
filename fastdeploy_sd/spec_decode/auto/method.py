"""The method `auto` of a server: the policy, told what steps really take, and kept from costing more than it brings.

Where nothing is worth drafting it is not even asked in most steps, so that these cost what plain decoding costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from fastdeploy_sd.draft_methods import METHODS
from fastdeploy_sd.spec_decode.auto.choice_log import ChoiceLog
from fastdeploy_sd.spec_decode.auto.cost import CostModel
from fastdeploy_sd.spec_decode.auto.dear_rows import DearRows
from fastdeploy_sd.spec_decode.auto.dear_source import DearSource
from fastdeploy_sd.spec_decode.auto.decision import Decision
from fastdeploy_sd.spec_decode.auto.guard import Guard
from fastdeploy_sd.spec_decode.auto.lessons import Lessons, NextStepNotes, step_over
from fastdeploy_sd.spec_decode.auto.next_step import NextStep
from fastdeploy_sd.spec_decode.auto.offers import NativeMethod
from fastdeploy_sd.spec_decode.auto.proposer import AutoProposer, OfferingMethod
from fastdeploy_sd.spec_decode.auto.rests import Rests
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, ProposerContext
from fastdeploy_sd.types import I32, ChoiceReport, DraftTokens

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

_MAX_NUM_ROWS = 4096
# Where asking takes more than this share of a step, only every fourth plain step is learned from, and of those with
# drafts up to so many are put off.
_LEARNING_SHARE, _PLAIN_STEPS_PER_LESSON, _MOST_PUT_OFF = 0.01, 4, 7
_DRAFTS, _LOW_GAIN, _LOAD, _REQUEST, _NO_DRAFTER = "drafts", "low_gain", "load", "request", "no_drafter"
_COMPARISON = "comparison"
_CHOICES = (_DRAFTS, _LOW_GAIN, _LOAD, _REQUEST, _NO_DRAFTER, _COMPARISON)


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
        self._choice, self._log = _REQUEST, ChoiceLog(_CHOICES, _DRAFTS, _REQUEST)
        self._num_unlearned = 0
        self._rests = Rests()
        self._lessons = Lessons(self._times, self._guard)
        # The policy's arguments are for a step of so many requests and this demand, and can be used again.
        self._bound: tuple[int, float] | None = None
        self._next = NextStepNotes()
        self._asked: ProposeInput | None = None  # whose rows the policy's arguments are for; None = others'
        self._latest: ProposeInput | None = None
        self._rows: bytes | None = None  # of the latest step; None = requests of the next one began since
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
        if self._may_look(x) and self._auto.ask_again() == 0:
            self._rest_on(time.perf_counter() - begin)
            return DraftTokens.none(len(x.table_rows))
        num_kv_tokens = sum(x.num_tokens.tolist())
        is_alone, is_same = self._is_alone(x), x is self._latest
        goes_on = is_same or self._have_same_rows(x)
        if is_alone and self._may_put_off():
            step = step_over(self._board, self._next, num_kv_tokens, is_alone=True, goes_on=goes_on)
            self._lessons.learn(step, put_off=True)
        else:
            self._observe(num_kv_tokens, is_alone=is_alone, goes_on=goes_on)
            self._bound = None  # what was learned may change what steps take
        if is_same and self._bound == (self._board.num_requests, self._guard.least_gain(self._board.num_requests)):
            decision = self._auto.decide_again(x)
            self._next.stretch, self._next.predicted_s = decision.time / decision.plain_time, 0.0
            drafts, choice = decision.drafts, self._outcome(decision, 0)
        else:
            drafts, choice = self._choose(x, num_kv_tokens)
        self._choice, self._next.num_kv_tokens = choice, num_kv_tokens
        self._log.note(choice)
        self._next.asking_s = asking_s = time.perf_counter() - begin
        self._next.choosing_s = asking_s - self._dear_s if choice == _DRAFTS else 0.0
        if self._log.is_due:
            self._board.report = self._log.report(self._guard.gain, self._lessons, self._auto.policy.stats())
        if choice == _DRAFTS:
            self._rests.note_drafts()
        elif choice != _COMPARISON and is_alone:
            self._rest(x, has_offers=choice != _NO_DRAFTER)
        return drafts

    def _have_same_rows(self, x: ProposeInput) -> bool:
        """Whether these are the rows of the latest step, and their requests, too."""
        rows = x.table_rows.tobytes()
        goes_on, self._rows, self._latest = rows == self._rows, rows, x
        return goes_on

    def _may_put_off(self) -> bool:
        """Whether the step that is over can be learned from later, as it is one of many that are alike.

        What learns is not in the caches: several steps at once take hardly longer than one.
        """
        b = self._board
        return (
            self._choice == _DRAFTS
            and self._lessons.num_put_off < _MOST_PUT_OFF
            and b.num_prompt_tokens_ahead == b.num_rested == 0
            and self._dear is None
            and self._is_dear_to_learn
        )

    def _may_look(self, x: ProposeInput) -> bool:
        """Whether to look first if there is anything to choose from, as lately there was not."""
        return self._rests.num_looks > 0 and x is self._asked and x is self._latest and self._is_alone(x)

    def _rest_on(self, seconds: float) -> None:
        """Nobody had a draft, which it took so long to find out: the next step is one of those that rest."""
        self._next.asking_s += seconds
        self._board.num_rested += 1
        self._board.num_rests = self._rests.note_look(seconds, self._board.seconds)

    def _rest(self, x: ProposeInput, *, has_offers: bool) -> None:
        """Nothing was worth drafting: leave some steps out."""
        b = self._board
        is_worth_asking = self._guard.is_worth_asking(b.num_requests)
        num_rests = self._rests.note_plain(
            self._next.asking_s, b.seconds, is_worth_asking=is_worth_asking, has_offers=has_offers
        )
        b.num_rests = num_rests if self._dear is None else min(num_rests, self._dear.num_rests(x))

    def _is_alone(self, x: ProposeInput) -> bool:
        """Whether the step had these rows only, those of requests that forbid drafts, and no parts of prompts."""
        b = self._board
        return b.num_requests == len(x.table_rows) + b.num_forbidden and b.num_prompt_tokens == 0

    def _choose(self, x: ProposeInput, num_kv_tokens: int) -> tuple[DraftTokens, str]:
        num_requests, num_certain = self._board.num_requests, 0 if x.prefix is None else len(x.prefix.token_ids)
        self._next.expect_nothing()
        self._bound = self._asked = None
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
            self._asked = x if self._dear is None and x.prefix is None else None
            # The first step with drafts behind a plain one takes longer than others.
            b = self._board
            has_drafts = b.num_tokens - b.num_prompt_tokens > num_requests
            is_usual = self._asked is not None and has_drafts and b.num_prompt_tokens_ahead == 0
            self._bound = (num_requests, least_gain) if is_usual else None
        self._expect(decision)
        choice = self._outcome(decision, num_certain)
        return decision.drafts, reason if math.isinf(least_gain) and choice != _DRAFTS else choice

    def _outcome(self, decision: Decision, num_certain: int) -> str:
        """Why the next step has these drafts, or none."""
        num_drafts = len(decision.drafts.token_ids)
        if num_drafts:
            self._next.is_certain = num_drafts <= num_certain
            return _DRAFTS
        if decision.num_offered == 0:
            return _NO_DRAFTER
        # The best of drafts brings one token: with so many others in the step that cannot be worth a row.
        return _LOAD if decision.first_draft_cost >= 1 / self._board.num_requests else _LOW_GAIN

    def _expect(self, decision: Decision) -> None:
        """Note what the next step is expected to take."""
        self._next.stretch = decision.time / decision.plain_time
        if self._times.model is not None:
            has_drafts = len(decision.drafts.token_ids) > 0
            around_ms = self._times.ms_around(self._board.num_requests, has_drafts=has_drafts)
            self._next.predicted_s = (decision.time * self._times.model.speed - around_ms) / 1e3

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

    def _observe(self, num_kv_tokens: int, *, is_alone: bool, goes_on: bool) -> None:
        """Learn from the steps that are over.

        Args:
            num_kv_tokens: in the contexts of the rows.
            is_alone: see _is_alone.
            goes_on: see _have_same_rows.
        """
        b = self._board
        self._begin_step()
        self._lessons.catch_up()
        num_rested, b.num_rested = b.num_rested, 0
        if num_rested:
            self._log.note_rested(num_rested)
            self._guard.rest(b.num_requests, num_rested)
        if is_alone and goes_on and b.num_tokens <= b.num_requests and not self._is_lesson():
            self._guard.note_asked(b.num_requests, self._next.asking_s)
            return
        step = step_over(b, self._next, num_kv_tokens, is_alone=is_alone, goes_on=goes_on)
        if num_rested:  # only the last of these steps is known
            step = step._replace(num_new=b.num_requests if is_alone else 0, predicted_s=0.0)
        self._lessons.learn(step)

    def _is_lesson(self) -> bool:
        """Whether to learn from a plain step that was just like others before it."""
        if not (self._is_dear_to_learn and self._guard.knows(self._board.num_requests)):
            return True
        self._num_unlearned = (self._num_unlearned + 1) % _PLAIN_STEPS_PER_LESSON
        return self._num_unlearned == 0

    @property
    def _is_dear_to_learn(self) -> bool:
        return self._next.asking_s > _LEARNING_SHARE * self._board.seconds
