"""Drafting methods with a habit: always right, always wrong, or anything. They exercise commit and rollback."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I8, I32, DraftSource, DraftTokens, LogprobArrays, RequestId, offsets
from tests.doubles.toy_logprobs import toy_logprobs

Continuations = Mapping[RequestId, Sequence[int]]
"""Request id -> prompt and everything the model will say after it, further than max_tokens."""


class _HabitProposer:
    """Turns one row's habit into the interface. Keeps only who has which table row, to check the worker's calls."""

    num_lookahead_slots = 0

    def __init__(self, continuations: Continuations, vocab_size: int) -> None:
        self.table_rows: dict[int, RequestId] = {}
        self._continuations = continuations
        self._vocab_size = vocab_size

    def propose(self, x: ProposeInput) -> DraftTokens:
        assert [self.table_rows[table_row] for table_row in x.table_rows.tolist()] == list(x.request_ids), (
            "a table row changed hands unseen"
        )
        trees = [
            self.tree(list(self._continuations[request_id][n : n + length]))
            for request_id, n, length in zip(
                x.request_ids, x.num_tokens.tolist(), x.max_draft_len.tolist(), strict=True
            )
        ]
        rows, parents = [row for row, _ in trees], [parent for _, parents in trees for parent in parents]
        lengths = [len(row) for row in rows]
        token_ids = np.array([token_id for row in rows for token_id in row], np.int32)
        sources = np.array([self.source_of(i) for length in lengths for i in range(length)], np.int8)
        logprobs = self._logprobs(x, token_ids, sources, lengths)
        drafts = DraftTokens(token_ids, offsets(lengths), sources, logprobs, np.array(parents, np.int32))
        return replace(drafts, parents=None) if self.is_silent(drafts) else drafts

    @staticmethod
    def source_of(position: int) -> DraftSource:
        """Who claims to have made the draft at a position: two come from a model, the rest extends them."""
        return DraftSource.MTP if position < 2 else DraftSource.NGRAM

    def is_silent(self, drafts: DraftTokens) -> bool:
        """Whether no parents are given, which says that all are chains."""
        return bool(drafts.is_chain.all())

    def _logprobs(self, x: ProposeInput, token_ids: I32, sources: I8, lengths: list[int]) -> LogprobArrays | None:
        wanted = x.num_draft_logprobs
        if wanted is None or wanted.max() < 0:
            return None
        has_logprob = (sources == DraftSource.MTP) & (np.repeat(wanted, lengths) >= 0)
        return toy_logprobs(token_ids, int(wanted.max()), self._vocab_size, has_logprob)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            assert request.table_row not in self.table_rows, f"table row {request.table_row} is in use"
            self.table_rows[request.table_row] = request.request_id

    def forget(self, table_rows: I32) -> None:
        for table_row in table_rows.tolist():
            self.table_rows.pop(table_row, None)

    def close(self) -> None:
        """Nothing to save."""

    def tree(self, right: list[int]) -> tuple[list[int], Sequence[int]]:
        """Drafts in place of the right ones, at most as many, and what each follows; see DraftTokens.parents."""
        drafts = self.draft(right)
        return drafts, range(-1, len(drafts) - 1)

    def draft(self, right: list[int]) -> list[int]:
        """Drafts in place of the right ones, as a chain; may be shorter."""
        raise NotImplementedError


class OracleProposer(_HabitProposer):
    """Always right, always as long as allowed."""

    def draft(self, right: list[int]) -> list[int]:
        return right


class WrongProposer(_HabitProposer):
    """Always wrong at every position, with valid ids, always as long as allowed."""

    def draft(self, right: list[int]) -> list[int]:
        return [(token_id + 1) % self._vocab_size for token_id in right]


class RandomLengthProposer(_HabitProposer):
    """A seeded mix of right, wrong, short and empty drafts, now and then with the parents that a chain has."""

    def __init__(self, continuations: Continuations, vocab_size: int, seed: int = 0) -> None:
        super().__init__(continuations, vocab_size)
        self._random = random.Random(seed)

    def draft(self, right: list[int]) -> list[int]:
        length = self._random.randint(0, len(right))
        first_wrong = self._random.randint(0, length) if self._random.random() < 0.7 else length
        return [
            token_id if i < first_wrong else (token_id + 1) % self._vocab_size
            for i, token_id in enumerate(right[:length])
        ]

    def is_silent(self, drafts: DraftTokens) -> bool:
        return super().is_silent(drafts) and self._random.random() < 0.5


class RandomTreeProposer(RandomLengthProposer):
    """Half of the drafts are chains; in the others a part of the right ones is hidden in a random tree.

    Wrong ones may be right elsewhere, and a node may have several children of the same token.
    """

    def tree(self, right: list[int]) -> tuple[list[int], Sequence[int]]:
        if self._random.random() < 0.5:
            return super().tree(right)
        drafts, parents, depths = list[int](), list[int](), [0]
        last, num_right = -1, self._random.randint(0, len(right))
        for i in range(len(right)):
            parent = last
            if depths[last + 1] >= num_right or self._random.random() < 0.5:
                parent = self._random.randint(-1, i - 1)
                drafts.append(
                    (right[min(depths[parent + 1], len(right) - 1)] + self._random.randint(0, 2)) % self._vocab_size
                )
            else:
                drafts.append(right[depths[parent + 1]])
                last = i
            parents.append(parent)
            depths.append(depths[parent + 1] + 1)
        return drafts, parents


class WrongTreeProposer(RandomTreeProposer):
    """Random trees without any right draft at their root."""

    def tree(self, right: list[int]) -> tuple[list[int], Sequence[int]]:
        drafts, parents = super().tree(right)
        wrong = [
            (right[0] + 1) % self._vocab_size if parent < 0 else d for d, parent in zip(drafts, parents, strict=True)
        ]
        return wrong, parents


class ReplacedDrafts:
    """Lets a real method work, and hands out another one's drafts in place of its own.

    The real method's state, draft KV first of all, then goes through acceptances and rejections that its own drafts
    would rarely bring.
    """

    def __init__(self, real: Proposer, drafts: Proposer) -> None:
        self._real, self._drafts = real, drafts

    @property
    def num_lookahead_slots(self) -> int:
        return self._real.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._real.begin(requests)
        self._drafts.begin(requests)

    def propose(self, x: ProposeInput) -> DraftTokens:
        max_tokens, is_drafting = x.token_table.shape[1], x.max_draft_len > 0
        assert ((x.num_tokens + x.max_draft_len)[is_drafting] < max_tokens).all(), "drafts past the model's length"
        self._real.propose(x)
        return self._drafts.propose(x)

    def forget(self, table_rows: I32) -> None:
        self._real.forget(table_rows)
        self._drafts.forget(table_rows)

    def close(self) -> None:
        self._real.close()
        self._drafts.close()
