"""Rows of a step that draft layers draft for, beside rows that have drafts of others in front."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control.model_draft_source import ModelDraftSource
from fastdeploy_sd.spec_decode.control.row_partition import RowPartition
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, TargetStep
from fastdeploy_sd.types import F32, DraftSource, DraftTokens, offsets
from fastdeploy_sd.types.draft_methods import METHODS
from tests.unit.spec_decode.test_model_draft_source import BLOCK_SIZE, NUM_SEQS, STEPS, Layers

PROMPT, NUM_TOKENS, MTP, GRAMMAR = 8, 12, int(DraftSource.MTP), int(DraftSource.GRAMMAR)
NGRAM = int(DraftSource.NGRAM)
OURS, FORCED = "", "mtp"
LAYERS_DRAFTS = [(NUM_TOKENS + i, MTP) for i in range(STEPS)]


def drafts_of(rows: list[list[int]], source: int) -> DraftTokens:
    token_ids = np.array([token_id for row in rows for token_id in row], np.int32)
    return DraftTokens(token_ids, offsets([len(row) for row in rows]), np.full(len(token_ids), source, np.int8))


def listed(drafts: DraftTokens) -> list[list[tuple[int, int]]]:
    """Tokens and their sources, row by row."""
    assert drafts.sources is not None
    pairs = list(zip(drafts.token_ids.tolist(), drafts.sources.tolist(), strict=True))
    cu = drafts.cu_num_draft.tolist()
    return [pairs[begin:end] for begin, end in pairwise(cu)]


def step_input(num_rows: int, num_computed: int, num_tokens: int, prefix: list[list[int]] | None) -> ProposeInput:
    rows = np.arange(num_rows, dtype=np.int32)
    computed, count = np.full_like(rows, num_computed), np.full_like(rows, num_tokens)
    target = TargetStep(offsets(count - 1 - computed), computed, count - 1, count + BLOCK_SIZE)
    return ProposeInput(
        request_ids=tuple(f"r{r}" for r in rows),
        table_rows=rows,
        token_table=np.zeros((NUM_SEQS, 64), np.int32),
        num_tokens=count,
        max_draft_len=np.full_like(rows, 5),
        prefix=None if prefix is None else drafts_of(prefix, GRAMMAR),
        target=target,
    )


class Step:
    """One step of requests that chose these methods, some with drafts in front; their prompts were run before.

    Args:
        prefix: what each has in front.
        wanted: drafts that those want which leave the choice to us; None = the layers are not asked.
        num_tokens: committed.

    Attributes:
        seen: what `choose` was given: the own rows.
        probs: of what the layers drafted for these.
    """

    def __init__(
        self,
        methods: list[str],
        prefix: list[list[int]] | None,
        wanted: list[int] | None,
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        self.layers, self._wanted = Layers(), wanted
        self.rows = RowPartition(ModelDraftSource(self.layers, NUM_SEQS, BLOCK_SIZE), METHODS["mtp"], NUM_SEQS)
        requests = [DraftRequest(f"r{r}", r, PROMPT, PROMPT, method=method) for r, method in enumerate(methods)]
        self.rows.begin(requests)
        none = np.zeros(len(methods), np.int32)
        self.rows.source.draft(step_input(len(methods), 0, PROMPT + 1, None), none, none.astype(np.float32))
        self.layers.num_asked.clear()
        self.x = step_input(len(methods), num_tokens - 2, num_tokens, prefix)
        self.seen: ProposeInput | None = None
        self.probs: F32 = np.zeros(0, np.float32)

    def choose(self, x: ProposeInput) -> DraftTokens:
        """Whole rows: what is in front, then what the layers draft, where they are asked; else one token."""
        self.seen = x
        num_rows = len(x.table_rows)
        tail = drafts_of([[7]] * num_rows, NGRAM)
        if self._wanted is not None:
            found, self.probs = self.rows.draft(np.array(self._wanted, np.int32), 0.25)
            tail = DraftTokens(found.token_ids, found.cu_num_draft, np.full(len(found.token_ids), MTP, np.int8))
        if x.prefix is None:
            return tail
        every = np.arange(num_rows)
        return DraftTokens.merge(num_rows, [(every, x.prefix), (every, tail)])

    def run(self) -> list[list[tuple[int, int]]]:
        return listed(self.rows.propose(self.x, self.choose))


def test_a_request_that_chose_the_layers_keeps_what_is_in_front_and_gets_nothing_behind_it() -> None:
    step = Step([OURS, FORCED, FORCED, OURS], [[], [1, 2], [], [3]], wanted=None)
    assert step.run() == [[(7, NGRAM)], [(1, GRAMMAR), (2, GRAMMAR)], LAYERS_DRAFTS, [(3, GRAMMAR), (7, NGRAM)]]
    assert step.layers.num_asked == [[0, 0, STEPS, 0]]
    assert step.seen is not None
    assert step.seen.table_rows.tolist() == [0, 3]
    assert step.seen.prefix is not None
    assert listed(step.seen.prefix) == [[], [(3, GRAMMAR)]]


def test_one_call_drafts_for_rows_that_want_it_and_for_those_that_chose_it() -> None:
    step = Step([FORCED, OURS, FORCED, OURS], [[1], [], [], [3, 4]], wanted=[2, 0])
    assert step.run() == [[(1, GRAMMAR)], LAYERS_DRAFTS[:2], LAYERS_DRAFTS, [(3, GRAMMAR), (4, GRAMMAR)]]
    assert step.layers.num_asked == [[0, 2, STEPS, 0]]
    np.testing.assert_array_equal(step.probs, np.full(2, 0.9, np.float32))


@pytest.mark.parametrize("prefix", [None, [[], [1, 2]]])
def test_where_everybody_chose_the_layers_nobody_else_is_asked(prefix: list[list[int]] | None) -> None:
    step = Step([FORCED, FORCED], prefix, wanted=None)
    assert step.run() == [LAYERS_DRAFTS, LAYERS_DRAFTS if prefix is None else [(1, GRAMMAR), (2, GRAMMAR)]]
    assert step.seen is None


def test_layers_are_left_alone_where_everything_they_could_draft_for_has_drafts_in_front() -> None:
    step = Step([FORCED, OURS], [[1, 2], [3]], wanted=None)
    assert step.run() == [[(1, GRAMMAR), (2, GRAMMAR)], [(3, GRAMMAR), (7, NGRAM)]]
    assert step.layers.num_asked == []


@pytest.mark.parametrize("wanted", [None, [0, 0], [0, 3]])
def test_where_nobody_chose_the_layers_the_step_is_chosen_for_as_it_is(wanted: list[int] | None) -> None:
    step = Step([OURS, OURS], [[1], []], wanted)
    tails = [[(7, NGRAM)]] * 2 if wanted is None else [LAYERS_DRAFTS[:count] for count in wanted]
    assert step.run() == [[(1, GRAMMAR), *tails[0]], tails[1]]
    assert step.seen is step.x
    assert step.layers.num_asked == ([wanted] if wanted is not None and any(wanted) else [])


@pytest.mark.parametrize("methods", [[OURS, OURS], [FORCED, OURS]])
def test_kv_that_cannot_wait_is_filled_whatever_is_in_front(methods: list[str]) -> None:
    step = Step(methods, [[1], [2]], wanted=None, num_tokens=BLOCK_SIZE + 1)
    assert step.run()[0][0] == (1, GRAMMAR)
    assert step.layers.num_asked == [[0, 0]]
