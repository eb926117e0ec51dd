"""Drafts that only some requests have: before their method's, whatever it is, and never at the others' cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import MethodDispatcher
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, ProposerContext
from fastdeploy_sd.types import I32, DraftTokens, offsets
from fastdeploy_sd.types.draft_methods import DraftSource
from tests.values import rows_of

MAX_LEN = 40
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4


@dataclass
class Forced(Proposer):
    """Knows the next tokens of the requests of a tenant, and raises on another one's."""

    salt: str
    tokens: list[int]
    seen: list[int] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    source: DraftSource = DraftSource.CUSTOM
    is_certain: bool = True

    @property
    def proposer(self) -> Proposer:
        return self

    def serves(self, request: DraftRequest) -> bool:
        return request.cache_salt == self.salt

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.begun.update(request.table_row for request in requests)

    def propose(self, x: ProposeInput) -> DraftTokens:
        self.seen += x.table_rows.tolist()
        if not self.tokens:
            raise RuntimeError("none")
        rows = [self.tokens[: max(n, 0)] for n in x.max_draft_len.tolist()]
        flat = np.array([token_id for row in rows for token_id in row], np.int32)
        return DraftTokens(flat, offsets([len(row) for row in rows]))

    def forget(self, table_rows: I32) -> None:
        self.begun.difference_update(table_rows.tolist())


def router(method: str, *partial: Forced) -> MethodDispatcher:
    config = SpeculativeConfig(method=method, num_speculative_tokens=8)
    return MethodDispatcher(config, replace(ProposerContext(4, MAX_LEN, 100), per_request_methods=partial))


def step(num_tokens: int, max_draft_len: Sequence[int]) -> ProposeInput:
    table = np.zeros((4, MAX_LEN), np.int32)
    table[:, : len(TEXT)] = TEXT
    rows = np.arange(len(max_draft_len), dtype=np.int32)
    return ProposeInput(
        request_ids=tuple(f"r{r}" for r in rows),
        table_rows=rows,
        token_table=table,
        num_tokens=np.full(len(rows), num_tokens, np.int32),
        max_draft_len=np.array(max_draft_len, np.int32),
    )


def begin(made: MethodDispatcher, salts: Sequence[str]) -> None:
    made.begin([DraftRequest(f"r{r}", r, 1, 1, cache_salt=salt) for r, salt in enumerate(salts)])


def test_a_fixed_method_goes_on_behind_them() -> None:
    first, second = Forced("a", [2, 3]), Forced("a", [4], source=DraftSource.HANDED_OVER)
    made = router("ngram", first, second)
    begin(made, ["a", "b", "a"])
    drafts = made.propose(step(19, [6, 6, 1]))  # the text so far ends with 9 1
    assert rows_of(drafts) == [[2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [2]]
    assert drafts.sources is not None
    assert drafts.sources.tolist() == [0, 0, 4, 1, 1, 1, *[1] * 6, 0]
    assert set(first.seen) == {0, 2}
    made.forget(np.array([0, 1], np.int32))
    assert first.begun == {2}


def test_a_method_that_chooses_weighs_them_as_certain() -> None:
    made = router("auto", Forced("a", [2, 3]))
    begin(made, ["a", "b"])
    drafts = made.propose(step(28, [8, 8]))
    assert rows_of(drafts)[0][:2] == [2, 3]
    assert drafts.sources is not None
    assert drafts.sources[:2].tolist() == [0, 0]
    assert (drafts.sources[2:] != 0).all()


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("method", ["ngram", "auto"])
def test_one_that_fails_costs_its_requests_these_drafts_only(method: str) -> None:
    made, plain = router(method, Forced("a", [])), router(method)
    for which in (made, plain):
        begin(which, ["a", "b"])
    x = step(28, [4, 4])
    assert rows_of(made.propose(x)) == rows_of(plain.propose(x))
