"""The method `auto` of a server: the controller learns from step times, and chooses the next step's drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from fastdeploy_sd.spec_decode.control.controller import LEAST_DEMAND
from fastdeploy_sd.spec_decode.control.decision import Decision, StepForecast
from fastdeploy_sd.spec_decode.control.model_draft_source import ModelDraftSource
from fastdeploy_sd.spec_decode.control.proposer import AutoProposer
from fastdeploy_sd.spec_decode.control.report import ChoiceLog
from fastdeploy_sd.spec_decode.control.row_partition import RowPartition
from fastdeploy_sd.spec_decode.methods.native_texts import TextProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, ProposerContext
from fastdeploy_sd.types import I32, ChoiceReport, DraftTokens
from fastdeploy_sd.types.draft_methods import METHODS

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig
    from fastdeploy_sd.spec_decode.control.profile import CostProfile

_MAX_NUM_ROWS = 4096
_DRAFTS, _LOW_GAIN, _LOAD, _REQUEST, _NO_DRAFTER = "drafts", "low_gain", "load", "request", "no_drafter"
_COMPARISON = "comparison"
_CHOICES = (_DRAFTS, _LOW_GAIN, _LOAD, _REQUEST, _NO_DRAFTER, _COMPARISON)

# The share of time that asking may take where nothing is worth drafting, and the most steps skipped at once.
_ASKING_SHARE, _MOST_SKIPPED = 0.005, 24
# After n steps without drafts worth a step, n^2 over this many are skipped: none after two, then more each time.
_PLAIN_PER_SKIP = 8
_MOST_PLAIN = math.isqrt(_PLAIN_PER_SKIP * _MOST_SKIPPED) + 1
# Where there was no draft, the drafters are only probed, at most so many times, before everything is asked again.
_MOST_PROBES = 7


class Backoff:
    """Counts the steps that asked for drafts in vain, and says how many to skip."""

    def __init__(self) -> None:
        self._num_plain = self.num_probes = 0

    def note_drafts(self) -> None:
        """There were drafts worth a step."""
        self._num_plain //= 2
        self.num_probes = 0

    def note_plain(self, asking_s: float, step_s: float, *, is_worth_asking: bool, has_offers: bool) -> int:
        """Nothing was worth drafting; returns how many steps to skip: all that is allowed if not `is_worth_asking`."""
        self.num_probes = 0 if has_offers else _MOST_PROBES
        skip_draft_steps = self._next(asking_s, step_s)
        return skip_draft_steps if is_worth_asking else _longest(asking_s, step_s)

    def note_probe(self, seconds: float, step_s: float) -> int:
        """A probe of this time found no draft; returns how many steps to skip."""
        self.num_probes -= 1
        return self._next(seconds, step_s)

    def _next(self, seconds: float, step_s: float) -> int:
        self._num_plain = min(self._num_plain + 1, _MOST_PLAIN)
        return min(self._num_plain**2 // _PLAIN_PER_SKIP, _longest(seconds, step_s))


def _longest(seconds: float, step_s: float) -> int:
    return min(int(seconds / (_ASKING_SHARE * max(step_s, 1e-9))), _MOST_SKIPPED)


class AutoMethod(Proposer):
    """Chooses among the server's methods, by request and step; loaded draft layers are asked by a RowPartition."""

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        drafters = [m for m in METHODS.values() if m.source is not None and not m.needs_model]
        methods = [(m.source, cast(TextProposer, context.other_method(m.name))) for m in drafters if m.source]
        self._step_stats = context.step_stats
        layers = next(iter(context.draft_models.values()), None)
        self._model_source: RowPartition | None = None
        if layers is not None:
            source = ModelDraftSource(
                context.other_method(layers.method.name),
                context.max_num_seqs,
                layers.block_size,
                layers.num_newest - 1,
                max_drafts=config.num_model_steps,
                fills_late=not layers.fills_in_time,
            )
            self._model_source = RowPartition(source, layers.method, context.max_num_seqs)
        self._auto = AutoProposer(
            methods,
            None,
            context.max_num_seqs,
            config.num_speculative_tokens,
            None if layers is None else layers.method.source,
            [(m.source, cast(TextProposer, m.proposer)) for m in context.per_request_methods if not m.is_certain],
        )
        self._has_costs = False
        self._backoff, self._log = Backoff(), ChoiceLog(_CHOICES, _DRAFTS, _REQUEST)
        self._next = self._auto.controller.prediction
        self._asked: ProposeInput | None = None  # the input that the controller's params are bound to
        self._latest: ProposeInput | None = None
        self._rows: bytes | None = None  # of the latest step; None = requests of the next one began since
        self._step_stats.report = ChoiceReport()

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._latest = self._rows = None  # another request in the same table row is not the one before it
        if self._model_source is not None:
            requests = self._model_source.begin(requests)
        self._auto.begin(requests)

    def forget(self, table_rows: I32) -> None:
        if self._model_source is not None:
            table_rows = self._model_source.forget(table_rows)
        self._auto.forget(table_rows)

    @property
    def num_lookahead_slots(self) -> int:
        return 0 if self._model_source is None else self._model_source.source.num_lookahead_slots

    def close(self) -> None:
        """The server owns the methods, and closes them."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Return the drafts that are worth their time, with the worthwhile part of each row's certain prefix."""
        if self._model_source is None:
            return self._propose(x)
        return self._model_source.propose(x, self._propose)

    def _propose(self, x: ProposeInput) -> DraftTokens:
        begin = time.perf_counter()
        if self._may_probe(x) and self._auto.controller.ask_again() == 0:
            self._note_empty_probe(time.perf_counter() - begin)
            return DraftTokens.none(len(x.table_rows))
        known = self._observe(x)
        drafts, choice = self._choose(x, known)
        self._log.note(choice)
        self._next.asking_s = asking_s = time.perf_counter() - begin - self._deferred_s
        self._next.choosing_s = asking_s - self._model_source_s if choice == _DRAFTS else 0.0
        if self._next.plain_time:  # they were asked
            self._next.lookup_s = asking_s - self._model_source_s
        if self._log.is_due:
            self._step_stats.report = self._log.report(known, self._auto.controller.stats())
        if choice == _DRAFTS:
            self._backoff.note_drafts()
        elif choice != _COMPARISON and known.is_decode_only:
            self._skip_steps(x, has_offers=choice != _NO_DRAFTER, is_worth_asking=known.is_worth_asking > 0)
        return drafts

    def _have_same_rows(self, x: ProposeInput) -> bool:
        """Whether the latest step had these rows and requests."""
        if x is self._latest:
            return True
        rows = x.table_rows.tobytes()
        goes_on, self._rows, self._latest = rows == self._rows, rows, x
        return goes_on

    def _may_probe(self, x: ProposeInput) -> bool:
        """Whether to probe for drafts first, as the latest steps had none."""
        return self._backoff.num_probes > 0 and x is self._asked and x is self._latest and self._is_decode_only(x)

    def _note_empty_probe(self, seconds: float) -> None:
        """The next step counts as skipped."""
        self._next.asking_s += seconds
        self._step_stats.num_skipped_steps += 1
        self._step_stats.skip_draft_steps = self._backoff.note_probe(seconds, self._step_stats.seconds)

    def _skip_steps(self, x: ProposeInput, *, has_offers: bool, is_worth_asking: bool) -> None:
        b = self._step_stats
        b.skip_draft_steps = self._backoff.note_plain(
            self._next.asking_s, b.seconds, is_worth_asking=is_worth_asking, has_offers=has_offers
        )
        if self._model_source is not None:
            b.skip_draft_steps = min(b.skip_draft_steps, self._model_source.max_skip_steps(x))

    def _is_decode_only(self, x: ProposeInput) -> bool:
        """Whether the step had only these rows and rows of requests that forbid drafts, and no parts of prompts."""
        b = self._step_stats
        return b.num_requests == len(x.table_rows) + b.num_forbidden and b.num_prompt_tokens == 0

    def _choose(self, x: ProposeInput, known: StepForecast) -> tuple[DraftTokens, str]:
        num_certain = 0 if x.prefix is None else len(x.prefix.token_ids)
        self._next.time, self._next.plain_time, self._next.is_certain = 0.0, 0.0, False
        self._asked = None
        if known.is_decided:
            decision = self._auto.controller.decision(len(x.table_rows))
            self._asked = x if x.prefix is None else None
        elif num_certain == 0 and not any(x.max_draft_len.tolist()):
            return DraftTokens.none(len(x.table_rows)), _REQUEST
        elif math.isinf(known.least_gain):
            reason = _LOW_GAIN if known.is_off else _COMPARISON
            # A comparison needs a plain step, which a request with certain drafts in every step would delay for ever.
            if num_certain == 0 or reason == _COMPARISON:
                return DraftTokens.none(len(x.table_rows)), reason
            # Guesses are not worth it; certain drafts may be.
            self._auto.controller.params.least_gain = LEAST_DEMAND
            decision = self._auto.decide(replace(x, max_draft_len=np.zeros(len(x.table_rows), np.int32)))
        else:
            decision = self._decide(x, known)
        self._next.time, self._next.plain_time = decision.time, decision.plain_time
        choice = self._outcome(decision, num_certain)
        return decision.drafts, reason if math.isinf(known.least_gain) and choice != _DRAFTS else choice

    def _outcome(self, decision: Decision, num_certain: int) -> str:
        """Return why the next step has these drafts, or none."""
        num_drafts = len(decision.drafts.token_ids)
        if num_drafts:
            self._next.is_certain = num_drafts <= num_certain
            return _DRAFTS
        if decision.num_offered == 0:
            return _NO_DRAFTER
        # A draft brings one token at most: among so many other tokens that cannot be worth its row.
        return _LOAD if decision.first_draft_cost >= 1 / self._step_stats.num_requests else _LOW_GAIN

    def _decide(self, x: ProposeInput, known: StepForecast) -> Decision:
        """Choose drafts; draft layers are asked in between, unless they back off."""
        if self._model_source is None or self._model_source.source.is_backing_off():
            return self._auto.decide(x)
        wanted, least = self._auto.ask(x, self._model_source.source, known.speed)
        drafts, draft_prob = self._model_source.draft(wanted, least)
        return self._auto.choose(x, drafts, draft_prob)

    @property
    def _model_source_s(self) -> float:
        """Seconds that draft layers have taken in this step."""
        return 0.0 if self._model_source is None else self._model_source.source.seconds

    @property
    def _deferred_s(self) -> float:
        """Seconds that draft layers have taken in this step, and that later calls are charged for."""
        return 0.0 if self._model_source is None else self._model_source.source.deferred_s

    def _take_costs(self, profile: CostProfile) -> None:
        self._auto.controller.take_costs(profile, _MAX_NUM_ROWS)
        if self._model_source is not None:
            self._model_source.take_costs(profile.drafts)
        self._has_costs = True

    def _observe(self, x: ProposeInput) -> StepForecast:
        """Learn from the finished step; without a model source, the same call chooses the next step's drafts."""
        b = self._step_stats
        if b.profile is not None and not self._has_costs:
            self._take_costs(b.profile)
        if self._model_source is not None:
            self._model_source.source.seconds = self._model_source.source.deferred_s = 0.0
        goes_on = self._have_same_rows(x)
        self._auto.bind(x)
        if b.num_skipped_steps:
            self._log.note_skipped(b.num_skipped_steps)
        return self._auto.controller.observe_and_decide(b, goes_on=goes_on, decides=self._model_source is None)
