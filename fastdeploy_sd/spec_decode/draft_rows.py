"""Rows of a drafting step: taking some out, naming the source of drafts, putting those of several methods together.

Knows no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import I8, I32, DraftSource, DraftTokens, LogprobArrays

Rows = npt.NDArray[np.intp]
_FIRST_NUM_SOURCES = 64
_Value = TypeVar("_Value", np.float32, np.int32)


class SourceColumn:
    """The source of drafts that one method made; all steps share its memory, which nobody can write to."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._column = self._filled(_FIRST_NUM_SOURCES)

    def mark(self, drafts: DraftTokens) -> DraftTokens:
        """Return drafts without sources as this source's."""
        num_drafts = len(drafts.token_ids)
        if num_drafts > len(self._column):
            self._column = self._filled(2 * num_drafts)
        return DraftTokens(drafts.token_ids, drafts.cu_num_draft, self._column[:num_drafts])

    def _filled(self, num_drafts: int) -> I8:
        column = np.full(num_drafts, self._source, np.int8)
        column.flags.writeable = False
        return column


def select_rows(x: ProposeInput, rows: Rows) -> ProposeInput:
    """Return the input of a method that runs no model and sees these rows only.

    Args:
        rows: intp[n], rising.

    Returns:
        Row i is row rows[i] of x; without `target`, whose ragged rows cannot be taken out.
    """
    return ProposeInput(
        request_ids=tuple(x.request_ids[r] for r in rows.tolist()),
        slots=x.slots[rows],
        token_table=x.token_table,
        num_tokens=x.num_tokens[rows],
        max_draft_len=x.max_draft_len[rows],
        num_draft_logprobs=None if x.num_draft_logprobs is None else x.num_draft_logprobs[rows],
        prefix=None if x.prefix is None else _select_tokens(x.prefix, rows),
    )


def slice_rows(x: ProposeInput, begin: int, end: int) -> ProposeInput:
    """Return the input of rows begin .. end - 1 only, with what the model ran of them."""
    rows = np.arange(begin, end)
    target = x.target
    if target is not None:
        first, last = int(target.query_start_loc[begin]), int(target.query_start_loc[end])
        hidden: Any = target.hidden  # sliced by rows, whatever holds them
        target = TargetStep(
            query_start_loc=target.query_start_loc[begin : end + 1] - target.query_start_loc[begin],
            num_computed_tokens=target.num_computed_tokens[begin:end],
            num_valid=target.num_valid[begin:end],
            block_table=target.block_table,
            num_kv_slots=target.num_kv_slots[begin:end],
            hidden=hidden[first:last],
        )
    return replace(select_rows(x, rows), target=target)


def _select_tokens(drafts: DraftTokens, rows: Rows) -> DraftTokens:
    """The token ids of some rows; a method that goes on after them needs nothing else."""
    counts = np.diff(drafts.cu_num_draft)[rows]
    cu = _offsets(counts)
    first = np.repeat(drafts.cu_num_draft[:-1][rows] - cu[:-1], counts)
    return DraftTokens(drafts.token_ids[first + np.arange(len(first))], cu)


def merge_drafts(num_rows: int, parts: Sequence[tuple[Rows, DraftTokens]]) -> DraftTokens:
    """Put drafts of several methods together.

    Row r of the result holds every part's drafts for row r, in the order of the parts. Where only some parts have
    sources, the others' are CUSTOM; where only some have log-probabilities, the others' are NaN with rank 0.

    Args:
        num_rows: R.
        parts: (rows intp[n], drafts of n rows): row i of the drafts belongs to row rows[i] of the result.
    """
    row_of = np.concatenate([np.repeat(rows, np.diff(drafts.cu_num_draft)) for rows, drafts in parts])
    order = np.argsort(row_of, kind="stable")
    drafts = [part for _, part in parts]
    return DraftTokens(
        token_ids=np.concatenate([part.token_ids for part in drafts])[order],
        cu_num_draft=_offsets(np.bincount(row_of, minlength=num_rows)),
        sources=_merge_sources(drafts, order),
        logprobs=_merge_logprobs(drafts, order),
    )


def _offsets(counts: npt.NDArray[np.integer]) -> I32:
    cu = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu[1:])
    return cu


def _merge_sources(drafts: Sequence[DraftTokens], order: Rows) -> I8 | None:
    if all(part.sources is None for part in drafts):
        return None
    columns = [
        np.full(len(part.token_ids), DraftSource.CUSTOM, np.int8) if part.sources is None else part.sources
        for part in drafts
    ]
    return np.concatenate(columns)[order]


def _merge_logprobs(drafts: Sequence[DraftTokens], order: Rows) -> LogprobArrays | None:
    num_top = max((part.logprobs.top_token_ids.shape[1] for part in drafts if part.logprobs is not None), default=None)
    if num_top is None:
        return None
    wide = [_widen_logprobs(part, num_top) for part in drafts]
    return LogprobArrays(
        logprobs=np.concatenate([part.logprobs for part in wide])[order],
        ranks=np.concatenate([part.ranks for part in wide])[order],
        top_token_ids=np.concatenate([part.top_token_ids for part in wide])[order],
        top_logprobs=np.concatenate([part.top_logprobs for part in wide])[order],
    )


def _widen_logprobs(drafts: DraftTokens, num_top: int) -> LogprobArrays:
    count, known = len(drafts.token_ids), drafts.logprobs
    if known is None:
        return LogprobArrays(
            logprobs=np.full(count, np.nan, np.float32),
            ranks=np.zeros(count, np.int32),
            top_token_ids=np.zeros((count, num_top), np.int32),
            top_logprobs=np.full((count, num_top), np.nan, np.float32),
        )
    return LogprobArrays(
        logprobs=known.logprobs,
        ranks=known.ranks,
        top_token_ids=_widen(known.top_token_ids, num_top, np.int32(0)),
        top_logprobs=_widen(known.top_logprobs, num_top, np.float32(np.nan)),
    )


def _widen(columns: npt.NDArray[_Value], num_columns: int, fill: _Value) -> npt.NDArray[_Value]:
    wide = np.full((len(columns), num_columns), fill, columns.dtype)
    wide[:, : columns.shape[1]] = columns
    return wide
