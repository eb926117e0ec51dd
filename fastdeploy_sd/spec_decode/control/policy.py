"""The draft policy, in the kernel library: what the offered drafts are worth, and which of them a step verifies."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import address, pointer
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, function_address, library
from fastdeploy_sd.device.program.bound_call import BoundCall
from fastdeploy_sd.spec_decode.control.batch_scaling import F64
from fastdeploy_sd.spec_decode.control.cost import MAX_STEP_DRAFTS, DraftTimes
from fastdeploy_sd.spec_decode.control.decision import Decision, SourceStats
from fastdeploy_sd.spec_decode.control.offers import OfferTable, PolicyRows
from fastdeploy_sd.spec_decode.control.regression_detector import LEAST_DEMAND
from fastdeploy_sd.spec_decode.methods.native.draft_call import NativeDrafter
from fastdeploy_sd.types import I32, DraftTokens
from fastdeploy_sd.types.draft_methods import DraftSource

MAX_DRAFT_LEN = 64
_NUM_STATS = 7
_NUM_OUTCOMES = 5
# What the native part of a decision's time goes into.
PHASES = ("check", "ask", "score", "predict", "fill")
_OPS = ("ask", "decide", "offer", "choose")
# A model knows more of its first draft than a look-up in a text does, and so does who asked.
_PRIOR_LOGITS = {DraftSource.MTP: 1.5, DraftSource.PREDICTION: 1.5}


class AutoPolicy:
    """Chooses source and draft length of every row, step by step.

    Args:
        num_table_rows: as many requests at most.
        max_draft_len: drafts per row at most, 1 .. 64.
        sources: what the planes of the offers hold.
        drafters: of sources that the policy asks itself; the caller writes the planes of the others. It keeps them
            alive.

    Attributes:
        handle: of the native object.
        params: of its decisions. Whoever writes `times` there in every step need not give them.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        num_table_rows: int,
        max_draft_len: int,
        sources: Sequence[DraftSource],
        drafters: Mapping[DraftSource, NativeDrafter] = MappingProxyType({}),
    ) -> None:
        self.sources = tuple(sources)
        handle = ctypes.c_void_p()
        source_ids = np.array(self.sources, np.int32)
        priors = np.array([_PRIOR_LOGITS.get(source, 0.0) for source in self.sources], np.float64)
        asked = [drafters.get(source) for source in self.sources]
        addresses = np.array([0 if d is None else d.handle.value for d in asked], np.uint64)
        functions = np.array([0 if d is None else function_address(d.op) for d in asked], np.uint64)
        params = struct_type("PolicyCreateParams")(
            num_table_rows=num_table_rows,
            num_sources=len(self.sources),
            max_draft_len=max_draft_len,
            source_ids=source_ids.ctypes.data,
            prior_logits=priors.ctypes.data,
            drafters=addresses.ctypes.data,
            proposes=functions.ctypes.data,
            policy=ctypes.addressof(handle),
        )
        call("policy_create", params)
        self.handle = handle
        weakref.finalize(self, library().fdsd_policy_destroy, handle)
        # Written in every step; what is handed out are copies of what was.
        self._outcome = np.zeros(_NUM_OUTCOMES, np.float64)
        self._token_ids = np.zeros(MAX_STEP_DRAFTS, np.int32)
        self._sources = np.zeros(MAX_STEP_DRAFTS, np.int8)
        self._cu_num_draft = np.zeros(num_table_rows + 1, np.int32)
        params = struct_type("PolicyDecideParams")(
            policy=handle,
            max_num_chosen=MAX_STEP_DRAFTS,
            draft_token_ids=address(self._token_ids),
            cu_num_draft=address(self._cu_num_draft),
            draft_sources=address(self._sources),
            outcome=address(self._outcome),
        )
        self.params: Any = params
        self._ask, self._decide, self._offer, self._choose = (BoundCall(f"policy_{op}", params) for op in _OPS)
        # What the params point to already: most is the same as in the last step.
        self._offers: OfferTable | None = None
        self._token_table: I32 | None = None
        self._table_rows: I32 | None = None
        self._num_tokens: I32 | None = None
        self._max_draft_len: I32 | None = None
        self._curve: F64 | None = None

    def measure(self, phase_seconds: F64) -> None:
        """From now on add the seconds of every step's phases to these, f64[5] as PHASES: ten looks at the clock.

        Raises:
            ValueError: shape or dtype is off.
        """
        self.params.phase_seconds = pointer("phase_seconds", phase_seconds, (len(PHASES),), np.float64)
        self._phase_seconds = phase_seconds  # kept alive

    def begin(self, table_rows: I32) -> None:
        """New requests come into these table rows, i32[n].

        Raises:
            ValueError: a table row is out of range.
        """
        self._call_rows("policy_begin", table_rows)

    def forget(self, table_rows: I32) -> None:
        """The requests of these table rows, i32[n], left; one that was not begun is ignored.

        Raises:
            ValueError: a table row is out of range.
        """
        self._call_rows("policy_forget", table_rows)

    def decide(
        self,
        x: PolicyRows,
        offers: OfferTable,
        times: DraftTimes | None,
        num_outputs: int = 0,
        least_gain: float = LEAST_DEMAND,
    ) -> Decision:
        """Score what was offered in earlier steps, ask the drafters, and choose from what is offered now.

        What is offered is judged by what is known of earlier offers only. Times are compared with each other alone.

        Args:
            offers: room for what the drafters offer, and what others do.
            times: of the next step; None = they were written to `params`, and what follows as well.
            num_outputs: requests that get a token in the next step even without drafts.
            least_gain: that guesses must be expected to bring, tokens per time over those without any; >= 1.

        Raises:
            ValueError: a shape or dtype disagrees, a count or a row is out of range, a row was not begun, times do
                not rise, or a drafter refused the rows. Nothing has been scored or chosen then.
        """
        self.bind(x, offers)
        self._bind_times(times, num_outputs, least_gain)
        self._decide.run()
        return self.decision(len(x.table_rows))

    def ask_again(self) -> int:
        """Return how many drafts would be offered for the latest rows, whose arrays hold another step by now.

        Nothing is scored or chosen.

        Raises:
            ValueError: as `decide`.
        """
        self._ask.run()
        return int(self._outcome.item(2))

    def offer(self, x: PolicyRows, offers: OfferTable) -> None:
        """The first part of `decide`: score, and ask the drafters. `choose` follows, with the same rows.

        In between, others may write their planes, empty until then, knowing what was offered.

        Raises:
            ValueError: as `decide`.
        """
        self.bind(x, offers)
        self._offer.run()

    def choose(
        self,
        x: PolicyRows,
        offers: OfferTable,
        times: DraftTimes | None,
        num_outputs: int = 0,
        least_gain: float = LEAST_DEMAND,
    ) -> Decision:
        """The second part of `decide`: choose from what is offered.

        Raises:
            ValueError: as `decide`.
        """
        self.bind(x, offers)
        self._bind_times(times, num_outputs, least_gain)
        self._choose.run()
        return self.decision(len(x.table_rows))

    def decision(self, num_rows: int) -> Decision:
        """Return what was decided last, for so many rows."""
        num_tokens, time, num_offered, first_draft_cost, plain_time = self._outcome.tolist()
        num_drafts = self._cu_num_draft.item(num_rows)
        if num_drafts == 0:
            drafts = DraftTokens.none(num_rows)
        else:
            drafts = DraftTokens(
                self._token_ids[:num_drafts].copy(),
                self._cu_num_draft[: num_rows + 1].copy(),
                self._sources[:num_drafts].copy(),
            )
        return Decision(drafts, num_tokens, time, int(num_offered), first_draft_cost, plain_time)

    def bind(self, x: PolicyRows, offers: OfferTable) -> None:
        """Have `params` say these rows and offers, as all that is asked does by itself.

        Raises:
            ValueError: a shape or dtype disagrees.
        """
        p, num_rows = self.params, len(x.table_rows)
        if offers is not self._offers:
            planes = offers.planes
            num_sources, max_num_rows = planes.evidence.shape[:2]
            if num_sources != len(self.sources):
                raise ValueError(f"offers: expected {len(self.sources)} sources, got {num_sources}")
            p.max_num_rows, p.max_num_drafts = max_num_rows, planes.token_ids.shape[1]
            p.token_ids, p.offers_cu_num_draft = address(planes.token_ids), address(planes.cu_num_draft)
            p.evidence, p.draft_prob = address(planes.evidence), address(planes.draft_prob)
            self._offers = offers
        if x.token_table is not self._token_table:
            p.num_table_rows, p.max_tokens_per_row = x.token_table.shape
            p.token_table = pointer("token_table", x.token_table, x.token_table.shape, np.int32)
            self._token_table = x.token_table
        per_row = (num_rows,)
        if x.table_rows is not self._table_rows:
            if num_rows >= len(self._cu_num_draft):
                raise ValueError(f"table_rows: expected at most {len(self._cu_num_draft) - 1} rows, got {num_rows}")
            p.table_rows = pointer("table_rows", x.table_rows, per_row, np.int32)
            p.num_rows = num_rows
            # The others are to be checked against this length.
            self._table_rows, self._num_tokens, self._max_draft_len = x.table_rows, None, None
        if x.num_tokens is not self._num_tokens:
            p.num_tokens = pointer("num_tokens", x.num_tokens, per_row, np.int32)
            self._num_tokens = x.num_tokens
        if x.max_draft_len is not self._max_draft_len:
            p.max_draft_len = pointer("max_draft_len", x.max_draft_len, per_row, np.int32)
            self._max_draft_len = x.max_draft_len
        self._bind_prefix(x.prefix, num_rows)

    def _bind_prefix(self, prefix: DraftTokens | None, num_rows: int) -> None:
        p = self.params
        if prefix is None:
            p.prefix_token_ids = p.cu_num_prefix = p.prefix_sources = None
            return
        if prefix.sources is None:
            raise ValueError("prefix: expected drafts that name their sources, got some without")
        num_prefix = (prefix.cu_num_draft.item(-1),)
        p.prefix_token_ids = pointer("prefix.token_ids", prefix.token_ids, num_prefix, np.int32)
        p.cu_num_prefix = pointer("prefix.cu_num_draft", prefix.cu_num_draft, (num_rows + 1,), np.int32)
        p.prefix_sources = pointer("prefix.sources", prefix.sources, num_prefix, np.int8)

    def _bind_times(self, times: DraftTimes | None, num_outputs: int, least_gain: float) -> None:
        if times is None:
            self._curve = None
            return
        p = self.params
        p.num_outputs, p.least_gain = num_outputs, least_gain
        if times.curve is not self._curve:
            p.curve = pointer("times", times.curve, times.curve.shape, np.float64)
            p.num_times = len(times.curve)
            self._curve = times.curve
        p.num_step_rows, p.fixed = times.num_rows, times.fixed
        p.per_draft, p.any_draft = times.per_draft, times.any_draft

    @property
    def times(self) -> DraftTimes:
        """Those of `params`; the curve is valid until they are written again."""
        p = self.params
        curve = np.ctypeslib.as_array((ctypes.c_double * p.num_times).from_address(p.curve))
        return DraftTimes(curve, p.num_step_rows, p.fixed, p.per_draft, p.any_draft)

    def stats(self) -> dict[DraftSource, SourceStats]:
        """How well each source's drafts were judged so far."""
        values = np.zeros((len(self.sources), _NUM_STATS), np.float64)
        call("policy_stats", struct_type("PolicyStatsParams")(policy=self.handle, stats=values.ctypes.data))
        return {
            source: SourceStats(int(v[0]), v[1], int(v[2]), v[3], int(v[4]), v[5], int(v[6]))
            for source, v in zip(self.sources, values.tolist(), strict=True)
        }

    def _call_rows(self, op: str, table_rows: I32) -> None:
        where = pointer("table_rows", table_rows, (len(table_rows),), np.int32)
        call(op, struct_type("PolicyTableRowsParams")(policy=self.handle, count=len(table_rows), table_rows=where))
