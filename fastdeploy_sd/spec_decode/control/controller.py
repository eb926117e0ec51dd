"""The draft controller of the kernel library: native, as Python code is no longer in the caches in a step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import address, pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import BoundCall, call, function_address, library
from fastdeploy_sd.spec_decode.control.decision import (
    MAX_STEP_DRAFTS,
    Decision,
    DraftTimes,
    SourceStats,
    StepForecast,
)
from fastdeploy_sd.spec_decode.control.offers import BoundRows, OfferTable
from fastdeploy_sd.spec_decode.control.profile import CostProfile
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.spec_decode.methods.native_texts import NativeDrafter
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import I32, DraftTokens
from fastdeploy_sd.types.draft_methods import METHODS, DraftSource

MAX_DRAFT_LEN = 64
_NUM_STATS, _NUM_OUTCOMES, _NUM_FORECASTS = 7, 6, 9
# The gain that drafts must promise where none have lost: the least demand of the regression detector.
LEAST_DEMAND = 1.03
_OPS = ("ask", "decide", "offer", "choose")
# First drafts of a model or of a client's prediction are accepted more often than those of a look-up in a text.
_GUESSED = (*(m.source for m in METHODS.values() if m.needs_model), DraftSource.PREDICTION)
_PRIOR_LOGITS = {source: 1.5 for source in _GUESSED if source is not None}


class DraftController:
    """Predicts step times, and chooses source and draft length of every row; raises ValueError for a bad number.

    Args:
        max_draft_len: drafts per row at most, 1 .. 64.
        sources: of the planes of the offers.
        drafters: of sources that the controller asks itself; the caller keeps them alive, and writes the other planes.
        makes_trees: whether a row's offers become one tree; else one of them is chosen.
        covered: sources whose drafts other sources mostly have: not asked where asking takes more than 0.03 of a step.

    Attributes:
        params: of decisions; `observe_and_decide` writes the times of the next step there.
        prediction: of the step ahead, which the caller writes after a decision; see ControllerStepParams.
    """

    def __init__(
        self,
        num_table_rows: int,
        max_draft_len: int,
        sources: Sequence[DraftSource],
        drafters: Mapping[DraftSource, NativeDrafter] = MappingProxyType({}),
        covered: Collection[DraftSource] = (),
        *,
        makes_trees: bool = False,
    ) -> None:
        self.sources = tuple(sources)
        handle = ctypes.c_void_p()
        source_ids = np.array(self.sources, np.int32)
        priors = np.array([_PRIOR_LOGITS.get(source, 0.0) for source in self.sources], np.float64)
        asked = [drafters.get(source) for source in self.sources]
        addresses = np.array([0 if d is None else d.handle.value for d in asked], np.uint64)
        functions = np.array([0 if d is None else function_address(d.op) for d in asked], np.uint64)
        params = struct_type("ControllerCreateParams")(
            num_table_rows=num_table_rows,
            num_sources=len(self.sources),
            max_draft_len=max_draft_len,
            makes_trees=makes_trees,
            source_ids=source_ids.ctypes.data,
            prior_logits=priors.ctypes.data,
            drafters=addresses.ctypes.data,
            proposes=functions.ctypes.data,
            covered_sources=sum(1 << self.sources.index(source) for source in covered),
            controller=ctypes.addressof(handle),
        )
        call("controller_create", params)
        self.handle = handle
        weakref.finalize(self, library().fdsd_controller_destroy, handle)
        # Written in every step; callers get copies.
        self._outcome = np.zeros(_NUM_OUTCOMES, np.float64)
        self._token_ids = np.zeros(MAX_STEP_DRAFTS, np.int32)
        self._sources = np.zeros(MAX_STEP_DRAFTS, np.int8)
        self._cu_num_draft = np.zeros(num_table_rows + 1, np.int32)
        self._parents = np.zeros(MAX_STEP_DRAFTS, np.int32)
        params = struct_type("ControllerDecideParams")(
            controller=handle,
            max_num_chosen=MAX_STEP_DRAFTS,
            draft_token_ids=address(self._token_ids),
            cu_num_draft=address(self._cu_num_draft),
            draft_sources=address(self._sources),
            draft_parents=address(self._parents) if makes_trees else None,
            outcome=address(self._outcome),
        )
        self.params: Any = params
        self._forecast = np.zeros(_NUM_FORECASTS, np.float64)
        step = struct_type("ControllerStepParams")(next=ctypes.addressof(params), outcome=address(self._forecast))
        self.prediction: Any = step
        self._step = BoundCall("controller_step", step)
        self._ask, self._decide, self._offer, self._choose = (BoundCall(f"controller_{op}", params) for op in _OPS)
        self._rows = BoundRows(params, len(self.sources), num_table_rows)

    def take_costs(self, profile: CostProfile, max_num_rows: int) -> None:
        """Use measured times for steps of 1 .. max_num_rows rows; until then, a draft takes a tenth of a step."""
        columns = [(s.rows, s.requests, s.context) for s in profile.steps]
        rows, requests, contexts = np.array(columns, np.int32).T.copy()
        ms = np.array([s.ms for s in profile.steps], np.float64)
        params = struct_type("ControllerCostParams")(
            controller=self.handle, max_num_rows=max_num_rows, num_samples=len(ms), rows=address(rows),
            requests=address(requests), contexts=address(contexts), ms=address(ms),
        )  # fmt: skip
        call("controller_take_costs", params)

    def begin(self, table_rows: I32) -> None:
        """Begin new requests in these table rows, i32[n]; raises ValueError where one is out of range."""
        self._call_rows("controller_begin", table_rows)

    def forget(self, table_rows: I32) -> None:
        """Forget the requests of these table rows, i32[n], as far as they were begun; raises as `begin`."""
        self._call_rows("controller_forget", table_rows)

    def observe_and_decide(self, stats: StepStats, *, goes_on: bool, decides: bool = False) -> StepForecast:
        """Learn from a finished step, and write the expected times of the next one to `params`.

        Args:
            stats: of the step; its skipped steps count once.
            goes_on: the step before it had the same rows: those of the latest `bind`.
            decides: also choose the drafts of the next step, where they are allowed and it need not be plain.

        Raises ValueError: a number is out of range; or the rows are refused, after the step was learned from.
        """
        p = self.prediction
        p.num_requests, p.num_rows, p.num_prompt_tokens = stats.num_requests, stats.num_tokens, stats.num_prompt_tokens
        p.num_forbidden, p.num_skipped_steps = stats.num_forbidden, stats.num_skipped_steps
        stats.num_skipped_steps = 0
        p.num_prompt_tokens_ahead = stats.num_prompt_tokens_ahead
        p.seconds, p.host_seconds = stats.seconds, stats.host_seconds
        p.goes_on, p.decides = goes_on, decides
        self._step.run()
        return StepForecast._make(self._forecast.tolist())

    def decide(
        self,
        x: ProposeInput,
        offers: OfferTable,
        times: DraftTimes | None,
        num_outputs: int = 0,
        least_gain: float = LEAST_DEMAND,
    ) -> Decision:
        """Score earlier offers, ask the drafters, and choose from the new offers.

        Args:
            times: of the next step; None = `params` has them, and the arguments after this one.
            num_outputs: requests that get a token in the next step even without drafts.
            least_gain: >= 1, the least expected gain of guesses: tokens per time over those of a plain step.

        Raises:
            ValueError: an argument is invalid, a row was not begun or a drafter refused; nothing has been scored then.
        """
        self.bind(x, offers)
        self._bind_times(times, num_outputs, least_gain)
        self._decide.run()
        return self.decision(len(x.table_rows))

    def ask_again(self) -> int:
        """Return how many drafts would be offered for the latest rows, whose arrays hold a newer step."""
        self._ask.run()
        return int(self._outcome.item(2))

    def offer(self, x: ProposeInput, offers: OfferTable) -> None:
        """The first part of `decide`. Before `choose`, the caller may write the planes of other sources."""
        self.bind(x, offers)
        self._offer.run()

    def choose(
        self,
        x: ProposeInput,
        offers: OfferTable,
        times: DraftTimes | None,
        num_outputs: int = 0,
        least_gain: float = LEAST_DEMAND,
    ) -> Decision:
        """The second part of `decide`: choose from what is offered for the same rows."""
        self.bind(x, offers)
        self._bind_times(times, num_outputs, least_gain)
        self._choose.run()
        return self.decision(len(x.table_rows))

    def decision(self, num_rows: int) -> Decision:
        """Return the latest decision, for so many rows."""
        num_tokens, time, num_offered, first_draft_cost, plain_time, branches = self._outcome.tolist()
        num_drafts = self._cu_num_draft.item(num_rows)
        if num_drafts == 0:
            drafts = DraftTokens.none(num_rows)
        else:
            drafts = DraftTokens(
                self._token_ids[:num_drafts].copy(),
                self._cu_num_draft[: num_rows + 1].copy(),
                self._sources[:num_drafts].copy(),
                parents=self._parents[:num_drafts].copy() if branches else None,
            )
        return Decision(drafts, num_tokens, time, int(num_offered), first_draft_cost, plain_time)

    def bind(self, x: ProposeInput, offers: OfferTable) -> None:
        """Write these rows and offers to `params`; see BoundRows.bind."""
        self._rows.bind(x, offers)

    def _bind_times(self, times: DraftTimes | None, num_outputs: int, least_gain: float) -> None:
        if times is None:
            return
        p = self.params
        p.num_outputs, p.least_gain = num_outputs, least_gain
        p.curve, p.num_times = pointer("times", times.curve, times.curve.shape, np.float64), len(times.curve)
        p.num_step_rows, p.fixed = times.num_rows, times.fixed
        p.per_draft, p.any_draft = times.per_draft, times.any_draft

    @property
    def times(self) -> DraftTimes:
        """The times in `params`; the curve is valid until they are written again."""
        p = self.params
        curve = np.ctypeslib.as_array((ctypes.c_double * p.num_times).from_address(p.curve))
        return DraftTimes(curve, p.num_step_rows, p.fixed, p.per_draft, p.any_draft)

    def stats(self) -> dict[DraftSource, SourceStats]:
        """Return how well each source's drafts were judged so far."""
        values = np.zeros((len(self.sources), _NUM_STATS), np.float64)
        params = struct_type("ControllerReportParams")(controller=self.handle, stats=values.ctypes.data)
        call("controller_report", params)
        return {
            source: SourceStats(int(v[0]), v[1], int(v[2]), v[3], int(v[4]), v[5], int(v[6]))
            for source, v in zip(self.sources, values.tolist(), strict=True)
        }

    def _call_rows(self, op: str, table_rows: I32) -> None:
        where, struct = pointer("table_rows", table_rows, (len(table_rows),), np.int32), "ControllerTableRowsParams"
        call(op, struct_type(struct)(controller=self.handle, count=len(table_rows), table_rows=where))
