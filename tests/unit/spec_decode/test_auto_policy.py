"""The draft policy: against its definition written out, and what it chooses of offers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.offers import OfferTable
from fastdeploy_sd.spec_decode.methods.ngram import NgramIndex
from fastdeploy_sd.spec_decode.methods.suffix_drafter import SuffixDrafter, SuffixLimits, SuffixRule
from fastdeploy_sd.types import DraftTokens, offsets
from fastdeploy_sd.types.draft_methods import DraftSource
from tests.unit.spec_decode.policy_reference import OfferedRow, ReferencePolicy
from tests.unit.spec_decode.policy_server import (
    MAX_LEN,
    NOTHING,
    SOURCES,
    PolicyServer,
    by_drafts,
    i32,
    linear,
    rows_of,
)


@pytest.mark.parametrize(
    ("num_rows", "num_steps"), [(5, 150), pytest.param(90, 12, id="more-offers-than-are-looked-at")]
)
def test_decides_as_the_definition_does(num_rows: int, num_steps: int) -> None:
    rng = random.Random(3)
    texts = [[rng.randrange(30) for _ in range(300)] for _ in range(num_rows)]
    server = PolicyServer(texts, SOURCES)
    reference = ReferencePolicy(16, [0.0, 0.0, 1.5])
    for row in range(num_rows):
        reference.begin(row)
    num_drafted = 0
    for step in range(num_steps):
        offers = [[_some_offer(rng, texts[r], server.num_tokens[r]) for _ in SOURCES] for r in range(num_rows)]
        # Flat, steep and with stairs.
        times = [1.0 + (0.0, 0.03, 0.2)[step % 3] * (4 + d - d % (1 + step % 4)) for d in range(40)]
        prefixes = [_some_prefix(rng, texts[r], server.num_tokens[r]) if step % 2 else [] for r in range(num_rows)]
        flat, cu = i32([token_id for row in prefixes for token_id in row]), offsets([len(row) for row in prefixes])
        prefix = DraftTokens(flat, cu, np.full(len(flat), DraftSource.CUSTOM, np.int8)) if step % 2 else None
        least_gain = (1.0, 1.02, 1.3)[step // 3 % 3]
        decision = server.decide(offers, times, prefix=prefix, least_gain=least_gain)
        committed = [texts[r][: server.num_tokens[r]] for r in range(num_rows)]
        expected = reference.decide(
            range(num_rows), committed, [64] * num_rows, offers, num_rows, times, prefixes, least_gain
        )
        sources = decision.drafts.sources
        assert sources is not None or not len(decision.drafts.token_ids)
        for r, (source, token_ids) in enumerate(expected):
            assert decision.drafts.row(r).tolist() == token_ids
            if sources is not None:
                begin, num_first = decision.drafts.cu_num_draft[r], min(len(prefixes[r]), len(token_ids))
                named = [DraftSource.CUSTOM] * num_first + [SOURCES[source]] * (len(token_ids) - num_first)
                assert sources[begin : begin + len(token_ids)].tolist() == named
        num_drafted += len(decision.drafts.token_ids)
        server.commit(decision.drafts)
        if min(len(text) - n for text, n in zip(texts, server.num_tokens, strict=True)) < 20:
            server.controller.begin(i32(range(num_rows)))
            server.num_tokens = [1] * num_rows
            for row in range(num_rows):
                reference.begin(row)
    assert num_drafted > 100
    for s, stats in enumerate(server.controller.stats().values()):
        scored = [(p, right) for source, p, right in reference.scored if source == s]
        assert (stats.num_scored, stats.observed) == (len(scored), sum(right for _, right in scored))
        assert stats.expected == pytest.approx(sum(p for p, _ in scored))
        assert stats.squared_error == pytest.approx(sum((right - p) ** 2 for p, right in scored))


def test_offering_and_choosing_apart_decides_the_same() -> None:
    """As a caller does that writes a plane in between; here the last source's, which offers nothing."""
    rng, rows, table = random.Random(5), i32([0, 1, 2]), np.zeros((3, MAX_LEN), np.int32)
    phrase = [rng.randrange(40) for _ in range(25)]
    for row in table:
        row[:] = [t if rng.random() < 0.95 else rng.randrange(40) for t in phrase * (MAX_LEN // 25)]
    decisions: list[list[list[int]]] = []
    for is_apart in (False, True):
        ngram = NgramIndex(3, 1, 5, 2.0, follows_copies=True)
        suffix = SuffixDrafter(3, 40, SuffixRule(), SuffixLimits(0, 0))
        drafters = {DraftSource.NGRAM: ngram.drafter, DraftSource.SUFFIX: suffix.drafter}
        policy, offers = DraftController(3, 16, SOURCES, drafters), OfferTable(3, 3, 16)
        ngram.begin(rows)
        for table_row in rows.tolist():
            suffix.begin(table_row, 0, bytes(16))
        policy.begin(rows)
        decisions.append([])
        for n in range(30, 330, 3):
            x, times = rows_of(rows, table, i32([n, n + 1, n + 2]), i32([16, 16, 0])), by_drafts(linear(0.1, 64, 3))
            if is_apart:
                policy.offer(x, offers)
                decision = policy.choose(x, offers, times, 3)
            else:
                decision = policy.decide(x, offers, times, 3)
            assert decision.num_offered > 0
            decisions[-1].append([*decision.drafts.cu_num_draft.tolist(), *decision.drafts.token_ids.tolist()])
    assert decisions[0] == decisions[1]
    assert sum(len(decision) > 4 for decision in decisions[0]) > 50


def test_of_more_offers_than_are_looked_at_those_that_were_asked_for_are() -> None:
    """A look-up's match of two tokens and a model's draft, which has matched nothing; half of the rows have both."""
    num_rows, num_both, token_id = 90, 45, 80
    text = [1, 2, 3, *range(50, 75), 1, 2]
    table, rows = np.tile(i32(text), (num_rows, 1)), i32(range(num_rows))
    ngram = NgramIndex(num_rows, 1, 5, 1.0, follows_copies=True)
    policy = DraftController(num_rows, 8, SOURCES, {DraftSource.NGRAM: ngram.drafter})
    offers, reference = OfferTable(3, num_rows, 8), ReferencePolicy(8, [0.0, 0.0, 1.5], asked=[0])
    ngram.begin(rows)
    policy.begin(rows)
    for row in range(num_rows):
        reference.begin(row)
    x = rows_of(rows, table, i32([len(text)] * num_rows), i32([4] * num_rows))
    policy.offer(x, offers)
    model_source = offers.offer(2, num_rows)
    model_source.cu_num_draft[:] = np.minimum(range(num_rows + 1), num_both)
    model_source.token_ids[:num_both], model_source.draft_prob[:num_both] = token_id, 0.9
    times = [1.0 + 1e-4 * d for d in range(300)]
    decision = policy.choose(x, offers, by_drafts(times), num_rows)
    ngram_row: OfferedRow = ([3, 50], [0.5, 0.5], (2, 2, 0))
    model_row: OfferedRow = ([token_id], [0.9], (0, 0, 0))
    offered = [[ngram_row, NOTHING, model_row if r < num_both else NOTHING] for r in range(num_rows)]
    expected = reference.decide(
        rows.tolist(), [text] * num_rows, [4] * num_rows, offered, num_rows, times, [[]] * num_rows
    )
    assert [decision.drafts.row(r).tolist() for r in range(num_rows)] == [token_ids for _, token_ids in expected]
    assert [source for source, _ in expected] == [2] * num_both + [0] * (num_rows - num_both)


def test_a_drafter_that_refuses_the_rows_says_so() -> None:
    suffix = SuffixDrafter(1, 40, SuffixRule(), SuffixLimits(0, 0))
    policy, offers = DraftController(1, 4, SOURCES[1:2], {SOURCES[1]: suffix.drafter}), OfferTable(1, 1, 4)
    policy.begin(i32([0]))
    x = rows_of(i32([0]), np.zeros((1, 8), np.int32), i32([4]), i32([4]))
    with pytest.raises(ValueError, match="expected to draft for table rows that were begun"):
        policy.decide(x, offers, by_drafts([1.0]), 1)


def _some_offer(rng: random.Random, text: Sequence[int], num_tokens: int) -> OfferedRow:
    """The text, with mistakes."""
    length = rng.choice([0, 0, 1, 3, 8, 16])
    token_ids = [t if rng.random() < 0.85 else rng.randrange(30) for t in text[num_tokens : num_tokens + length]]
    matched = rng.choice([0, 2, 5, 9, 30])
    evidence = (matched, rng.choice([matched, matched // 2]), rng.randrange(2))
    # As the arrays hold them: a number between two buckets must fall into the same one.
    return token_ids, [float(np.float32(rng.random())) for _ in token_ids], evidence


def _some_prefix(rng: random.Random, text: Sequence[int], num_tokens: int) -> list[int]:
    """The text, or once in a while another one: a prefix is not always as certain as it is taken for."""
    row = list(text[num_tokens : num_tokens + rng.choice([0, 0, 1, 4])])
    return row if rng.random() < 0.9 else [(token_id + 1) % 30 for token_id in row]


def test_the_likeliest_drafts_of_all_rows_fill_a_stair() -> None:
    # Three drafts are free, the fourth doubles the step: the surest ones of both rows get them.
    server = PolicyServer([[1], [1]], [DraftSource.NGRAM])
    sure, unsure = ([5] * 4, [0.99] * 4, (50, 50, 0)), ([6] * 4, [0.05] * 4, (1, 1, 0))
    decision = server.decide([[sure], [unsure]], [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert np.diff(decision.drafts.cu_num_draft).tolist() == [3, 0]
    assert decision.time == 1.0
    assert 2.0 < decision.num_tokens < 5.0


@pytest.mark.parametrize(("share_right", "wants_all"), [(0.97, True), (0.4, False)])
def test_drafts_that_pay_only_together_are_taken_together(share_right: float, wants_all: bool) -> None:
    # Any drafts with 8 rows make the step 6.1 times as long. What is a tenth better with 64 of them must not be
    # lost for what they take in themselves.
    rng = random.Random(1)
    server = PolicyServer([list(range(1 + 40 * r, 391 + 40 * r)) for r in range(8)], [DraftSource.NGRAM], 8)
    model_source = [1.0] + [6.1] * 64
    for _ in range(30):
        rows = [text[n : n + 8] for text, n in zip(server.texts, server.num_tokens, strict=True)]
        offers = [[([t if rng.random() < share_right else 0 for t in row], [0.5] * 8, (30, 30, 0))] for row in rows]
        server.commit(server.decide(offers, linear(0.01, 64, 8)).drafts)
    decision = server.decide(offers, model_source)
    assert len(decision.drafts.token_ids) >= 48 if wants_all else len(decision.drafts.token_ids) == 0
    assert decision.num_tokens / decision.time >= 8.0


def test_many_other_rows_make_the_drafts_of_a_row_not_worth_it() -> None:
    # The same draft, in a step that a token more makes longer by a little, and by much.
    offer = ([5], [0.5], (5, 5, 0))
    cheap, model_source = (PolicyServer([[1]], [DraftSource.NGRAM]) for _ in range(2))
    assert len(cheap.decide([[offer]], [1.0, 1.1]).drafts.token_ids) == 1
    assert len(model_source.decide([[offer]], [1.0, 1.9]).drafts.token_ids) == 0


def test_what_any_draft_takes_must_be_brought_by_all_of_them() -> None:
    offer = ([5] * 8, [0.9] * 8, (30, 30, 0))
    few, many = (PolicyServer([[1]], [DraftSource.NGRAM]) for _ in range(2))
    assert len(few.decide([[([5], [0.9], (30, 30, 0))]], linear(0.0, 64), any_draft=1.2).drafts.token_ids) == 0
    assert len(many.decide([[offer]], linear(0.0, 64), any_draft=1.2).drafts.token_ids) == 8


def test_what_is_demanded_of_drafts_must_be_expected_of_them() -> None:
    offer = ([5], [0.5], (5, 5, 0))
    gain = PolicyServer([[1]], [DraftSource.NGRAM]).decide([[offer]], [1.0, 1.0]).num_tokens
    for least_gain, wanted in ((gain * 0.99, 1), (gain * 1.01, 0)):
        server = PolicyServer([[1]], [DraftSource.NGRAM])
        assert len(server.decide([[offer]], [1.0, 1.0], least_gain=least_gain).drafts.token_ids) == wanted


def test_a_row_that_may_not_draft_has_none() -> None:
    server = PolicyServer([[1]], [DraftSource.NGRAM])
    offers = [[([5], [0.9], (9, 9, 0))]]
    assert len(server.decide(offers, linear(0.0, 64), max_len=0).drafts.token_ids) == 0
    assert len(server.decide(offers, [1.0]).drafts.token_ids) == 0


@pytest.mark.parametrize(
    ("times", "message"),
    [([], "times: expected at least one"), ([1.0, 0.5], "rising"), ([0.0], "> 0"), ([math.inf], "finite")],
)
def test_times_are_checked(times: list[float], message: str) -> None:
    server = PolicyServer([[1]], [DraftSource.NGRAM])
    with pytest.raises(ValueError, match=message):
        server.decide([[NOTHING]], times)


def test_rows_are_checked() -> None:
    policy, offers = DraftController(2, 4, [DraftSource.NGRAM]), OfferTable(1, 2, 4)
    one, table = by_drafts([1.0]), np.zeros((2, 4), np.int32)
    with pytest.raises(ValueError, match="begun"):
        policy.decide(rows_of(i32([0]), table, i32([1]), i32([1])), offers, one, 1)
    policy.begin(i32([0]))
    with pytest.raises(ValueError, match="at most a row of token_table"):
        policy.decide(rows_of(i32([0]), table, i32([5]), i32([1])), offers, one, 1)
    with pytest.raises(ValueError, match="num_table_rows"):
        policy.begin(i32([2]))
    policy.forget(i32([0, 1]))
    with pytest.raises(ValueError, match="begun"):
        policy.decide(rows_of(i32([0]), table, i32([1]), i32([1])), offers, one, 1)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="max_draft_len"):
        DraftController(1, 65, [DraftSource.NGRAM])
    with pytest.raises(ValueError, match="num_sources"):
        DraftController(1, 4, [])
