"""Texts that a draft policy is asked about, step by step, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.decision import Decision, DraftTimes
from fastdeploy_sd.spec_decode.control.offers import OfferTable
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import I32, DraftTokens, offsets
from fastdeploy_sd.types.draft_methods import DraftSource
from tests.unit.spec_decode.policy_reference import OfferedRow

SOURCES = (DraftSource.NGRAM, DraftSource.SUFFIX, DraftSource.MTP)
MAX_LEN = 400
NOTHING: OfferedRow = ([], [], (0, 0, 0))


def i32(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def rows_of(
    table_rows: I32, token_table: I32, num_tokens: I32, max_draft_len: I32, prefix: DraftTokens | None = None
) -> ProposeInput:
    return ProposeInput((), table_rows, token_table, num_tokens, max_draft_len, prefix=prefix)


def by_drafts(times: Sequence[float]) -> DraftTimes:
    """Times of a step with 0, 1, .. drafts and two other rows, a part of them in what every step takes."""
    return DraftTimes(np.array([9.0, 9.0, *times], np.float64) - 0.5, 2, 0.5)


def put(table: OfferTable, offers: Sequence[Sequence[OfferedRow]]) -> None:
    """`offers[r][s]` into the planes."""
    for s in range(len(offers[0])):
        out = table.offer(s, len(offers))
        rows = [offers[r][s] for r in range(len(offers))]
        out.cu_num_draft[:] = offsets([len(token_ids) for token_ids, _, _ in rows])
        flat = [token_id for token_ids, _, _ in rows for token_id in token_ids]
        out.token_ids[: len(flat)] = flat
        out.draft_prob[: len(flat)] = [prob for _, probs, _ in rows for prob in probs]
        out.evidence[:] = [evidence for _, _, evidence in rows]


class PolicyServer:
    """Texts that are known, committed as the policy's drafts allow."""

    def __init__(self, texts: Sequence[Sequence[int]], sources: Sequence[DraftSource], max_draft_len: int = 16) -> None:
        self.texts = texts
        self.num_tokens = [1] * len(texts)
        self.controller = DraftController(len(texts), max_draft_len, sources)
        self.offers = OfferTable(len(sources), len(texts), max_draft_len)
        self.controller.begin(i32(range(len(texts))))

    def decide(
        self,
        offers: Sequence[Sequence[OfferedRow]],
        times: Sequence[float],
        max_len: int = 64,
        prefix: DraftTokens | None = None,
        least_gain: float = 1.0,
        any_draft: float = 0.0,
    ) -> Decision:
        put(self.offers, offers)
        table = np.zeros((len(self.texts), MAX_LEN), np.int32)
        for r, n in enumerate(self.num_tokens):
            table[r, :n] = self.texts[r][:n]
        rows = i32(range(len(self.texts)))
        lengths = i32([max_len] * len(rows))
        x = rows_of(rows, table, i32(self.num_tokens), lengths, prefix)
        found = by_drafts(times)._replace(any_draft=any_draft)
        return self.controller.decide(x, self.offers, found, len(rows), least_gain)

    def commit(self, drafts: DraftTokens) -> int:
        """Accept what is right, and one token more; returns how many tokens of all rows."""
        total = 0
        for r, text in enumerate(self.texts):
            rest = text[self.num_tokens[r] :]
            row = drafts.row(r).tolist()
            num_right = next((i for i, (a, b) in enumerate(zip(row, rest, strict=False)) if a != b), len(row))
            emitted = min(num_right + 1, len(rest))
            self.num_tokens[r] += emitted
            total += emitted
        return total


def linear(cost: float, num_drafts: int, rows: int = 1) -> list[float]:
    return [1.0 + cost * (rows - 1 + d) for d in range(num_drafts + 1)]
