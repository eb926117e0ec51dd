from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.methods.hybrid import HybridProposer
from fastdeploy_sd.spec_decode.methods.ngram import NgramProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, ProposerContext, TargetStep
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, LogprobArrays
from tests.values import i32

if TYPE_CHECKING:
    pass

MTP, NGRAM = DraftSource.MTP, DraftSource.NGRAM


def ragged(rows: Sequence[Sequence[int]]) -> DraftTokens:
    flat = [token_id for row in rows for token_id in row]
    return DraftTokens(i32(*flat), np.cumsum([0, *map(len, rows)]).astype(np.int32))


@dataclass
class RecordedModel:
    """A method with a model: says what is written down per table row, one draft at most, and remembers its calls."""

    says: Mapping[int, Sequence[int]]
    num_steps: int = 1
    num_lookahead_slots: int = 1
    with_logprobs: bool = False
    begun: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    num_closed: int = 0
    inputs: list[ProposeInput] = field(default_factory=list)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.begun += [request.table_row for request in requests]

    def propose(self, x: ProposeInput) -> DraftTokens:
        self.inputs.append(x)
        drafts = ragged(
            [
                list(self.says.get(table_row, []))[: min(most, self.num_steps)]
                for table_row, most in zip(x.table_rows.tolist(), x.max_draft_len.tolist(), strict=True)
            ]
        )
        n = len(drafts.token_ids)
        logprobs = LogprobArrays(
            -np.ones(n, np.float32), np.ones(n, np.int32), np.ones((n, 2), np.int32), -np.ones((n, 2), np.float32)
        )
        return DraftTokens(
            drafts.token_ids,
            drafts.cu_num_draft,
            np.full(n, MTP, np.int8),
            logprobs if self.with_logprobs else None,
        )

    def forget(self, table_rows: I32) -> None:
        self.forgotten += table_rows.tolist()

    def close(self) -> None:
        self.num_closed += 1


TABLE = np.array([[1, 2, 3, 4, 1], [7, 8, 9, 7, 8], [5, 5, 5, 6, 6]], np.int32)


def ngram() -> Proposer:
    config = SpeculativeConfig(method="ngram", min_ngram_size=2, max_ngram_size=3)
    return DraftGuard(NgramProposer(config, ProposerContext(3, TABLE.shape[1], 100)), DraftSource.NGRAM)


def step(
    hybrid: Proposer, table_rows: Sequence[int], max_draft_len: Sequence[int], prefix: DraftTokens | None = None
) -> list[Any]:
    n = i32(*[TABLE.shape[1]] * len(table_rows))
    target = TargetStep(n, n, n, n)
    ids = tuple(str(table_row) for table_row in table_rows)
    drafts = hybrid.propose(
        ProposeInput(ids, i32(*table_rows), TABLE, n, i32(*max_draft_len), prefix=prefix, target=target)
    )
    assert drafts.sources is not None
    bounds = drafts.cu_num_draft.tolist()
    pairs = list(zip(drafts.token_ids.tolist(), drafts.sources.tolist(), strict=True))
    return [pairs[a:b] for a, b in itertools.pairwise(bounds)]


def begin(hybrid: Proposer, *table_rows: int) -> None:
    hybrid.begin([DraftRequest(str(table_row), table_row, 3, TABLE.shape[1]) for table_row in table_rows])


def test_the_second_method_continues_the_first() -> None:
    hybrid = HybridProposer(RecordedModel({0: [2], 1: [0], 2: []}), ngram(), 3)
    begin(hybrid, 0, 1, 2)
    assert step(hybrid, [0, 1, 2], [4, 4, 4]) == [
        [(2, MTP), (3, NGRAM), (4, NGRAM), (1, NGRAM)],  # 1 2 occurred before
        [(0, MTP)],  # 8 0 did not
        [],  # nor did 6 6
    ]


def test_the_second_method_drafts_alone_where_the_first_has_nothing() -> None:
    hybrid = HybridProposer(RecordedModel({0: [2]}), ngram(), 3)
    begin(hybrid, 0, 1)
    assert step(hybrid, [1, 0], [2, 2]) == [[(9, NGRAM), (7, NGRAM)], [(2, MTP), (3, NGRAM)]]


def test_the_budget_is_shared() -> None:
    hybrid = HybridProposer(RecordedModel({0: [2, 3], 1: [9, 7]}, num_steps=2), ngram(), 3)
    begin(hybrid, 0, 1)
    assert step(hybrid, [0, 1], [0, 0]) == [[], []]
    assert step(hybrid, [0, 1], [1, 2]) == [[(2, MTP)], [(9, MTP), (7, MTP)]]
    assert step(hybrid, [0, 1], [3, 0]) == [[(2, MTP), (3, MTP), (4, NGRAM)], []]


def test_rows_begun_elsewhere_reach_the_model_only() -> None:
    model = RecordedModel({0: [2]})
    hybrid = HybridProposer(model, ngram(), 3)
    begin(hybrid, 0)
    # The n-gram method refuses table rows that it did not begin.
    assert step(hybrid, [2, 0, 1], [0, 2, 0]) == [[], [(2, MTP), (3, NGRAM)], []]
    assert model.inputs[-1].table_rows.tolist() == [2, 0, 1]
    assert model.inputs[-1].target is not None


def test_drafts_made_before_both_come_first() -> None:
    model = RecordedModel({1: [8]})
    hybrid = HybridProposer(model, ngram(), 3)
    begin(hybrid, 1)
    given = ragged([[9, 7]])
    assert step(hybrid, [1], [3], given) == [[(8, MTP), (9, NGRAM), (7, NGRAM)]]
    assert model.inputs[-1].prefix is given


def test_only_the_models_drafts_have_logprobs() -> None:
    hybrid = HybridProposer(RecordedModel({0: [2]}, with_logprobs=True), ngram(), 3)
    begin(hybrid, 0)
    n = i32(5)
    drafts = hybrid.propose(ProposeInput(("0",), i32(0), TABLE, n, i32(2), num_draft_logprobs=i32(2)))
    assert drafts.token_ids.tolist() == [2, 3]
    assert drafts.logprobs is not None
    assert drafts.logprobs.ranks.tolist() == [1, 0]
    np.testing.assert_array_equal(drafts.logprobs.logprobs, np.array([-1, np.nan], np.float32))
    assert drafts.logprobs.top_token_ids.shape == (2, 2)


def test_everything_else_goes_to_both() -> None:
    first, rest = RecordedModel({}, num_lookahead_slots=3), RecordedModel({}, num_lookahead_slots=0)
    hybrid = HybridProposer(first, rest, 3)
    assert hybrid.num_lookahead_slots == 3
    begin(hybrid, 2, 0)
    hybrid.forget(i32(0, 1))
    hybrid.close()
    assert first.begun == rest.begun == [2, 0]
    assert first.forgotten == rest.forgotten == [0, 1]
    assert first.num_closed == rest.num_closed == 1
    step(hybrid, [0, 2], [1, 1])
    assert rest.inputs[-1].table_rows.tolist() == [2]
