"""The draft policy, in the kernel library: what the offered drafts are worth, and which of them a step verifies."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.draft_methods import DraftSource
from fastdeploy_sd.runtime.arrays import address, pointer
from fastdeploy_sd.runtime.bound_call import BoundCall
from fastdeploy_sd.runtime.layout import struct_type
from fastdeploy_sd.runtime.library import call, library
from fastdeploy_sd.spec_decode.auto.cost import F64
from fastdeploy_sd.spec_decode.auto.offers import OfferTable
from fastdeploy_sd.types import I32, DraftTokens

MAX_DRAFT_LEN = 64
# Drafts of one row beyond which more of them brought nothing on any recording.
USUAL_DRAFT_LEN = 32
_NUM_STATS = 7
_NUM_OUTCOMES = 4
# A model knows more of its first draft than a look-up in a text does.
_PRIOR_LOGITS = {DraftSource.MTP: 1.5}


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInput:
    """The rows of a step that was committed, and what the next one costs.

    Attributes:
        table_rows: i32[R], rows of token_table, none twice; those of prompts under way may be left out.
        token_table: i32[num_table_rows, max_model_len], committed tokens.
        num_tokens: i32[R], committed tokens of each row.
        max_draft_len: i32[R], 0 = none for this row. What it was offered is scored all the same.
        num_outputs: requests that get a token in the next step even without drafts.
        times: f64[N], N >= 1: what the next step takes with 0, 1, .. N - 1 drafts in it beside everything else, in any
            unit; > 0 and rising. N - 1 bounds the drafts of all rows together.
    """

    table_rows: I32
    token_table: I32
    num_tokens: I32
    max_draft_len: I32
    num_outputs: int
    times: F64


class SourceStats(NamedTuple):
    """How well the drafts of a source were judged.

    Attributes:
        num_scored: drafts compared with the text, each after those before it in its offer were right.
        expected, observed: how many of them should have been right, and were.
        squared_error: sum of the squared differences between probability and outcome.
        num_wanted: drafts that went into a step.
        wanted_expected, wanted_accepted: how many of them should have been accepted, and were.
    """

    num_scored: int
    expected: float
    observed: int
    squared_error: float
    num_wanted: int
    wanted_expected: float
    wanted_accepted: int

    @property
    def brier_score(self) -> float:
        """The mean squared error of the probabilities: 0 is perfect, 0.25 knows nothing; NaN before the first."""
        return self.squared_error / self.num_scored if self.num_scored else float("nan")


class Decision(NamedTuple):
    """What goes into the next step.

    Attributes:
        drafts: of every row, with their sources.
        num_tokens, time: expected of the step, the time in the unit of `PolicyInput.times`.
    """

    drafts: DraftTokens
    num_tokens: float
    time: float


class AutoPolicy:
    """Chooses source and draft length of every row, step by step.

    Args:
        num_table_rows: as many requests at most.
        max_draft_len: drafts per row at most, 1 .. 64.
        sources: what the planes of the offers hold.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, num_table_rows: int, max_draft_len: int, sources: Sequence[DraftSource]) -> None:
        self.sources = tuple(sources)
        handle = ctypes.c_void_p()
        source_ids = np.array(self.sources, np.int32)
        priors = np.array([_PRIOR_LOGITS.get(source, 0.0) for source in self.sources], np.float64)
        params = struct_type("PolicyCreateParams")(
            num_table_rows=num_table_rows,
            num_sources=len(self.sources),
            max_draft_len=max_draft_len,
            source_ids=source_ids.ctypes.data,
            prior_logits=priors.ctypes.data,
            policy=ctypes.addressof(handle),
        )
        call("policy_create", params)
        self._handle = handle
        weakref.finalize(self, library().fdsd_policy_destroy, handle)
        self._outcome = np.zeros(_NUM_OUTCOMES, np.float64)
        self._decide = BoundCall("policy_decide", struct_type("PolicyDecideParams")(policy=handle))
        self._decide.params.outcome = address(self._outcome)
        self._offers: OfferTable | None = None
        self._token_table: I32 | None = None

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

    def decide(self, x: PolicyInput, offers: OfferTable) -> Decision:
        """Score what was offered in earlier steps against the committed tokens, and choose from what is offered now.

        What is offered is judged by what is known of earlier offers only. Times are compared with each other alone.

        Raises:
            ValueError: a shape or dtype disagrees, a count or a row is out of range, a row was not begun, or times do
                not rise. Nothing has changed then.
        """
        p, num_rows, max_num_drafts = self._decide.params, len(x.table_rows), len(x.times) - 1
        self._bind(x.token_table, offers)
        if max_num_drafts < 0:
            raise ValueError("times: expected at least one, got none")
        per_row = (num_rows,)
        p.num_rows = num_rows
        p.table_rows = pointer("table_rows", x.table_rows, per_row, np.int32)
        p.num_tokens = pointer("num_tokens", x.num_tokens, per_row, np.int32)
        p.max_draft_len = pointer("max_draft_len", x.max_draft_len, per_row, np.int32)
        p.num_outputs, p.num_times = x.num_outputs, max_num_drafts + 1
        p.times = pointer("times", x.times, x.times.shape, np.float64)
        token_ids, cu_num_draft = np.empty(max_num_drafts, np.int32), np.empty(num_rows + 1, np.int32)
        sources = np.empty(max_num_drafts, np.int8)
        p.draft_token_ids, p.cu_num_draft, p.draft_sources = address(token_ids), address(cu_num_draft), address(sources)
        self._decide.run()
        num_tokens, time, _, _ = self._outcome.tolist()
        num_drafts = cu_num_draft.item(-1)
        if num_drafts == 0:
            return Decision(DraftTokens.none(num_rows), num_tokens, time)
        return Decision(DraftTokens(token_ids[:num_drafts], cu_num_draft, sources[:num_drafts]), num_tokens, time)

    def _bind(self, token_table: I32, offers: OfferTable) -> None:
        """Point to arrays that are the same in every step, where they are not those of the last one."""
        p, planes = self._decide.params, offers.planes
        if offers is not self._offers:
            num_sources, max_num_rows = planes.evidence.shape[:2]
            if num_sources != len(self.sources):
                raise ValueError(f"offers: expected {len(self.sources)} sources, got {num_sources}")
            p.max_num_rows, p.max_num_drafts = max_num_rows, planes.token_ids.shape[1]
            p.token_ids, p.offers_cu_num_draft = address(planes.token_ids), address(planes.cu_num_draft)
            p.evidence, p.draft_prob = address(planes.evidence), address(planes.draft_prob)
            self._offers = offers
        if token_table is not self._token_table:
            p.num_table_rows, p.max_tokens_per_row = token_table.shape
            p.token_table = pointer("token_table", token_table, token_table.shape, np.int32)
            self._token_table = token_table

    def stats(self) -> dict[DraftSource, SourceStats]:
        """How well each source's drafts were judged so far."""
        values = np.zeros((len(self.sources), _NUM_STATS), np.float64)
        call("policy_stats", struct_type("PolicyStatsParams")(policy=self._handle, stats=values.ctypes.data))
        return {
            source: SourceStats(int(v[0]), v[1], int(v[2]), v[3], int(v[4]), v[5], int(v[6]))
            for source, v in zip(self.sources, values.tolist(), strict=True)
        }

    def _call_rows(self, op: str, table_rows: I32) -> None:
        where = pointer("table_rows", table_rows, (len(table_rows),), np.int32)
        call(op, struct_type("PolicyTableRowsParams")(policy=self._handle, count=len(table_rows), table_rows=where))
