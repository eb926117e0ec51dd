"""The rows of a step and the offers of sources, in arrays that the native controller reads in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import address, pointer
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import F32, I32, DraftTokens

NUM_EVIDENCE = 3


@dataclass(frozen=True, slots=True, eq=False)
class DraftOffer:
    """The arrays of one source: its drafts for the rows of a step, and the evidence for them.

    Attributes:
        token_ids: i32[D], of which the first cu_num_draft[R] are drafts.
        cu_num_draft: i32[R+1].
        evidence: i32[R, 3]: tokens of the text's end that agreed; of them, those after the last replaced one; the
            origin: 0 = the request's own text, 1 = other requests' outputs. 0 where nothing was drafted.
        parents: i32[D], see DraftTokens; None where no trees are made.
        draft_prob: f32[D]: count of the token / (count of all continuations + 1); 0.5 where nothing is counted.
    """

    token_ids: I32
    cu_num_draft: I32
    evidence: I32
    draft_prob: F32
    parents: I32 | None = None


class OfferTable:
    """The offers of a step, one plane per source; the same arrays in every step; see DraftOffer."""

    def __init__(self, num_sources: int, max_num_rows: int, max_draft_len: int, *, has_trees: bool = False) -> None:
        s, r, d = num_sources, max_num_rows, max_num_rows * max_draft_len
        self.token_ids, self.draft_prob = np.zeros((s, d), np.int32), np.zeros((s, d), np.float32)
        self.parents = np.zeros((s, d), np.int32) if has_trees else None
        self.cu_num_draft = np.zeros((s, r + 1), np.int32)
        self.evidence = np.zeros((s, r, NUM_EVIDENCE), np.int32)

    def offer(self, source: int, num_rows: int) -> DraftOffer:
        """Return the arrays in which a source offers drafts for `num_rows` rows."""
        return DraftOffer(
            self.token_ids[source], self.cu_num_draft[source, : num_rows + 1], self.evidence[source, :num_rows],
            self.draft_prob[source], None if self.parents is None else self.parents[source],
        )  # fmt: skip

    def clear(self, source: int) -> None:
        """The source offers nothing in this step."""
        self.cu_num_draft[source] = 0


class BoundRows:
    """Writes the rows of each step to ControllerDecideParams, as far as they differ from the step before."""

    def __init__(self, params: Any, num_sources: int, max_num_rows: int) -> None:
        self._params, self._num_sources, self._max_num_rows = params, num_sources, max_num_rows
        self._offers: OfferTable | None = None
        self._token_table: I32 | None = None
        self._table_rows: I32 | None = None
        self._num_tokens: I32 | None = None
        self._max_draft_len: I32 | None = None

    def bind(self, x: ProposeInput, offers: OfferTable) -> None:
        """Write these rows and offers; raises ValueError where a shape or dtype disagrees."""
        p, num_rows = self._params, len(x.table_rows)
        if offers is not self._offers:
            num_sources, max_num_rows = offers.evidence.shape[:2]
            if num_sources != self._num_sources:
                raise ValueError(f"offers: expected {self._num_sources} sources, got {num_sources}")
            p.max_num_rows, p.max_num_drafts = max_num_rows, offers.token_ids.shape[1]
            p.token_ids, p.offers_cu_num_draft = address(offers.token_ids), address(offers.cu_num_draft)
            p.evidence, p.draft_prob = address(offers.evidence), address(offers.draft_prob)
            p.parents = None if offers.parents is None else address(offers.parents)
            self._offers = offers
        if x.token_table is not self._token_table:
            p.num_table_rows, p.max_tokens_per_row = x.token_table.shape
            p.token_table = pointer("token_table", x.token_table, x.token_table.shape, np.int32)
            self._token_table = x.token_table
        per_row = (num_rows,)
        if x.table_rows is not self._table_rows:
            if num_rows > self._max_num_rows:
                raise ValueError(f"table_rows: expected at most {self._max_num_rows} rows, got {num_rows}")
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
        p = self._params
        if prefix is None:
            p.prefix_token_ids = p.cu_num_prefix = p.prefix_sources = None
            return
        if prefix.sources is None:
            raise ValueError("prefix: expected drafts that name their sources, got some without")
        num_prefix = (prefix.cu_num_draft.item(-1),)
        p.prefix_token_ids = pointer("prefix.token_ids", prefix.token_ids, num_prefix, np.int32)
        p.cu_num_prefix = pointer("prefix.cu_num_draft", prefix.cu_num_draft, (num_rows + 1,), np.int32)
        p.prefix_sources = pointer("prefix.sources", prefix.sources, num_prefix, np.int8)
