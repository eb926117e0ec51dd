"""Guesses, and log-probabilities of tokens: ragged values that are cut, picked and put together on their way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types.arrays import EMPTY_I32, F32, I8, I32, Rows, merge_rows, offsets, take_rows
from fastdeploy_sd.types.draft_methods import DraftSource

# In place of a draft's id: only who made it has it, and it follows the row's newest token.
MADE_ON_DEVICE = -1
# New tokens of a request whose drafts are a tree, the newest committed one included: bits of an attention mask.
MAX_TREE_ROWS = 64

Index = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class LogprobArrays:
    """Log-probabilities of a step's tokens; n is the largest number of alternatives asked for in the step.

    Attributes:
        logprobs, top_logprobs: f32[O], f32[O, n], NaN where not asked for.
        ranks, top_token_ids: i32[O] from 1, i32[O, n], 0 where not asked for.
    """

    logprobs: F32
    ranks: I32
    top_token_ids: I32
    top_logprobs: F32

    @staticmethod
    def empty(num_tokens: int, num_top: int) -> LogprobArrays:
        """Empty arrays for so many tokens, to be filled by `put`."""
        return LogprobArrays(
            np.full(num_tokens, np.nan, np.float32),
            np.zeros(num_tokens, np.int32),
            np.zeros((num_tokens, num_top), np.int32),
            np.full((num_tokens, num_top), np.nan, np.float32),
        )

    @staticmethod
    def concat(parts: Sequence[LogprobArrays]) -> LogprobArrays:
        """Concatenate parts, as wide as the widest."""
        cu = offsets([len(part.logprobs) for part in parts])
        merged = LogprobArrays.empty(int(cu[-1]), max(part.top_token_ids.shape[1] for part in parts))
        for begin, part in zip(cu.tolist(), parts, strict=False):
            merged.put(slice(begin, begin + len(part.logprobs)), part)
        return merged

    def put(self, at: Index | slice, found: LogprobArrays) -> None:
        """Write what was found for the tokens at these places; it has at most as many alternatives as there are."""
        num_top = found.top_token_ids.shape[1]
        self.logprobs[at], self.ranks[at] = found.logprobs, found.ranks
        self.top_token_ids[at, :num_top] = found.top_token_ids
        self.top_logprobs[at, :num_top] = found.top_logprobs

    def take(self, index: Index) -> LogprobArrays:
        """Return those of the tokens `index`."""
        return LogprobArrays(
            self.logprobs[index], self.ranks[index], self.top_token_ids[index], self.top_logprobs[index]
        )


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Guesses to be verified; row r owns `token_ids[cu_num_draft[r]:cu_num_draft[r+1]]`.

    Every draft counts as certain (one-hot) in its method: verification needs no distribution of it.

    Attributes:
        token_ids, cu_num_draft: i32[D], i32[R+1].
        sources: i8[D], a DraftSource each; None = all CUSTOM.
        logprobs: over D, under the drafting model; None when no request asked, or no model drafted.
        parents: i32[D], the draft of the same row that each one follows, counted from the row's first;
            -1 = it follows the row's committed tokens. None = a chain: each follows the one before it.
    """

    token_ids: I32
    cu_num_draft: I32
    sources: I8 | None = None
    logprobs: LogprobArrays | None = None
    parents: I32 | None = None

    @staticmethod
    @functools.cache
    def none(num_requests: int) -> DraftTokens:
        """No drafts for so many rows; read-only, so all plain steps share one per number of rows."""
        cu_num_draft = np.zeros(num_requests + 1, np.int32)
        cu_num_draft.flags.writeable = False
        return DraftTokens(EMPTY_I32, cu_num_draft)

    @staticmethod
    def concat(parts: Sequence[DraftTokens]) -> DraftTokens:
        """Concatenate the rows of all parts. Fields that only some parts have are filled in for the others."""
        if len(parts) == 1:
            return parts[0]
        return DraftTokens(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            cu_num_draft=offsets(np.concatenate([np.diff(part.cu_num_draft) for part in parts])),
            sources=_concat_sources(parts),
            logprobs=concat_logprobs([(len(part.token_ids), part.logprobs) for part in parts]),
            parents=None if all(part.parents is None for part in parts) else np.concatenate(list(map(_parents, parts))),
        )

    @staticmethod
    def merge(num_rows: int, parts: Sequence[tuple[Rows, DraftTokens]]) -> DraftTokens:
        """Put drafts of several methods together: row r holds every part's drafts for row r, in the order of the parts.

        Args:
            num_rows: R.
            parts: (rows intp[n], drafts of n rows) each: row i of the drafts belongs to row rows[i].
        """
        if not parts:
            return DraftTokens.none(num_rows)
        order, cu = merge_rows(num_rows, [(rows, drafts.cu_num_draft) for rows, drafts in parts])
        merged = DraftTokens.concat([drafts for _, drafts in parts])
        if merged.parents is not None:
            num_before, num_so_far = [], np.zeros(num_rows, np.int32)
            for rows, drafts in parts:
                counts = np.diff(drafts.cu_num_draft)
                num_before.append(np.repeat(num_so_far[rows], counts))
                num_so_far[rows] += counts
            merged = replace(merged, parents=merged.parents + np.concatenate(num_before))
        return merged.pick(order, cu)

    def row(self, r: int) -> I32:
        """The drafts of a row."""
        return self.token_ids[self.cu_num_draft[r] : self.cu_num_draft[r + 1]]

    def take(self, rows: Rows) -> DraftTokens:
        """Return some rows, intp[n], in this order."""
        return self.pick(*take_rows(self.cu_num_draft, rows))

    def pick(self, index: Index, cu_num_draft: I32) -> DraftTokens:
        """Return the drafts `index` as rows of other lengths; a row of them must be the first of one row's here."""
        return DraftTokens(
            self.token_ids[index],
            cu_num_draft,
            None if self.sources is None else self.sources[index],
            None if self.logprobs is None else self.logprobs.take(index),
            None if self.parents is None else self.parents[index],
        )

    def parent_rows(self, cu_num_logits: I32) -> I32 | None:
        """Return i32[L], the row of logits that each row follows, counted from its request's first; None = chains.

        Row j > 0 of a request is that of draft j - 1; row 0 follows none, -1. `cu_num_logits`: i32[R+1].
        """
        if self.parents is None:
            return None
        parents = np.full(cu_num_logits[-1], -1, np.int32)
        for r in np.flatnonzero(np.diff(self.cu_num_draft)).tolist():
            first, end = int(cu_num_logits[r]) + 1, int(cu_num_logits[r + 1])
            begin = int(self.cu_num_draft[r])
            parents[first:end] = self.parents[begin : begin + max(end - first, 0)] + 1
        return parents

    def keep(self, is_kept: npt.NDArray[np.bool_]) -> DraftTokens:
        """Return the drafts of bool[D], of each with those on its path."""
        places = offsets(is_kept)
        kept = self.pick(np.flatnonzero(is_kept), places[self.cu_num_draft])
        if kept.parents is None:
            return kept
        begins = self.cu_num_draft[:-1]
        before, firsts = (np.repeat(x, np.diff(kept.cu_num_draft)) for x in (begins, kept.cu_num_draft[:-1]))
        followed = places[before + np.maximum(kept.parents, 0)] - firsts
        return replace(kept, parents=np.where(kept.parents < 0, -1, followed).astype(np.int32))

    def chains(self) -> DraftTokens:
        """Return of each row the drafts before the first that does not follow the one before it."""
        if self.parents is None:
            return self
        num_wrong = offsets(self.parents != chain_parents(self.cu_num_draft))
        is_kept = num_wrong[1:] == np.repeat(num_wrong[self.cu_num_draft[:-1]], np.diff(self.cu_num_draft))
        return replace(self.keep(is_kept), parents=None)

    def without_chains(self) -> DraftTokens:
        """Return the same drafts, without parents where all rows are chains."""
        has_chains = self.parents is not None and bool(self.is_chain.all())
        return replace(self, parents=None) if has_chains else self

    def parents_of(self, r: int) -> Sequence[int]:
        """The draft that each one of row r follows, counted from its first; -1 = none."""
        begin, end = self.cu_num_draft[r : r + 2].tolist()
        return range(-1, end - begin - 1) if self.parents is None else self.parents[begin:end].tolist()

    def path(self, r: int, draft: int) -> list[int]:
        """The drafts of row r up to one of them, counted from its first; -1: none."""
        found = []
        while draft >= 0:
            found.append(draft)
            draft = draft - 1 if self.parents is None else int(self.parents[self.cu_num_draft[r] + draft])
        return found[::-1]

    @property
    def is_chain(self) -> npt.NDArray[np.bool_]:
        """bool[R]: whether each draft of the row follows the one before it."""
        if self.parents is None:
            return np.ones(len(self.cu_num_draft) - 1, np.bool_)
        num_wrong = offsets(self.parents != chain_parents(self.cu_num_draft))[self.cu_num_draft]
        return np.equal(num_wrong[1:], num_wrong[:-1])


def chain_parents(cu_num_draft: I32) -> I32:
    """Return i32[D], what `DraftTokens.parents` says of chains."""
    return np.arange(cu_num_draft[-1], dtype=np.int32) - np.repeat(cu_num_draft[:-1], np.diff(cu_num_draft)) - 1


def _parents(drafts: DraftTokens) -> I32:
    return chain_parents(drafts.cu_num_draft) if drafts.parents is None else drafts.parents


def _concat_sources(parts: Sequence[DraftTokens]) -> I8 | None:
    if all(part.sources is None for part in parts):
        return None
    custom = np.int8(DraftSource.CUSTOM)
    return np.concatenate(
        [np.full(len(p.token_ids), custom, np.int8) if p.sources is None else p.sources for p in parts]
    )


def concat_logprobs(parts: Sequence[tuple[int, LogprobArrays | None]]) -> LogprobArrays | None:
    """Put the log-probabilities of parts of so many tokens one after the other; None = no part has any."""
    if all(logprobs is None for _, logprobs in parts):
        return None
    return LogprobArrays.concat([LogprobArrays.empty(n, 0) if logprobs is None else logprobs for n, logprobs in parts])
