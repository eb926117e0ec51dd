"""Drafts from predicted outputs: against the rule written out, and what of an edited text they bring."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import MethodDispatcher
from fastdeploy_sd.spec_decode.methods.prediction import PredictionDrafter
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, offsets

WINDOW, NEAR, TRUSTED, LONGEST, GRAM = 64, 8, 4, 8, 4


def i32(values: Sequence[int]) -> I32:
    return np.array(values, np.int32)


class Follower:
    """custom_ops/cpu/drafters/predicted_text.h, from its description."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.output = list(text), list[int]()
        self.expected: int | None = 0
        self.home = self.recent = self.num_changed = 0
        self.is_trusted = False

    def read(self, token: int) -> None:
        self.output.append(token)
        if self.expected is not None and self.text[self.expected : self.expected + 1] == [token]:
            self.expected += 1
            self.recent += 1
            if self.is_trusted or self.recent >= TRUSTED:
                self.home, self.is_trusted, self.num_changed = self.expected, True, 0
            return
        self.is_trusted = False
        self.num_changed += 1
        near = [(self._agreeing(end), end) for end in range(self.home + 1, min(self.home + WINDOW, len(self.text)) + 1)]
        near = [(n, end) for n, end in near if n > 1 or (n == 1 and end <= self.home + NEAR)]
        length, place = max(near, key=lambda found: (found[0], -found[1]), default=(0, None))
        if length < 2 and len(self.output) >= GRAM:
            ends = [end for end in range(GRAM, len(self.text) + 1) if self._agreeing(end) >= GRAM]
            if ends:
                length, place = GRAM, next((end for end in ends if end >= self.home), ends[-1])
        if place is None and self.num_changed == 1:
            place = self.home + 1
        self.expected, self.recent = place, length

    def _agreeing(self, end: int) -> int:
        n = 0
        while n < min(LONGEST, end, len(self.output)) and self.text[end - 1 - n] == self.output[-1 - n]:
            n += 1
        return n

    def drafts(self, budget: int) -> list[int]:
        if self.expected is None:
            return []
        limit = budget if self.is_trusted else min(budget, 2 * (self.recent + 1))
        return self.text[self.expected : self.expected + limit]


def edited(rng: random.Random, text: Sequence[int], rate: float, num_tokens: int) -> list[int]:
    """The text with tokens replaced, left out and put in, a part moved, and something before it."""
    made = list(text)
    if rng.random() < 0.3:
        at, n = rng.randrange(len(made)), rng.randrange(20)
        part = made[at : at + n]
        del made[at : at + n]
        to = rng.randrange(len(made) + 1)
        made[to:to] = part
    output = [rng.randrange(num_tokens) for _ in range(rng.choice([0, 1, 3]))]
    for token in made:
        kind = rng.random() / rate if rate else 1.0
        if kind >= 0.7:
            output.append(token)
        elif kind < 0.5:
            output += [rng.randrange(num_tokens) for _ in range(rng.randint(1, 6))]
            if kind < 0.25:
                output.append(token)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 12, 1000])
def test_follows_as_the_definition_does(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    for case in range(20):
        text = [rng.randrange(num_tokens) for _ in range(rng.choice([1, 3, 5, 120]))]
        output = edited(rng, text, rng.choice([0.0, 0.05, 0.3]), num_tokens) or [1]
        prompt = [rng.randrange(num_tokens) for _ in range(case % 7)]
        table = np.zeros((2, 1024), np.int32)
        row = prompt + output[: 1024 - len(prompt)]
        table[1, : len(row)] = row
        drafter, twin = PredictionDrafter(2), Follower(text)
        drafter.begin(1, len(prompt), i32(text))
        n, num_read = len(prompt), 0
        while n < len(row):
            num_prefix = rng.choice([0, 0, 1, 3])
            x = _step(table, [0, 1], [5, n], [4, rng.choice([0, 2, 16])], [[], row[n : n + num_prefix]])
            found = drafter.propose(x)
            for token in row[len(prompt) + num_read : n]:
                twin.read(token)
            num_read = n - len(prompt)
            ahead = Follower(text)
            for token in row[len(prompt) : n + num_prefix]:
                ahead.read(token)
            assert found.row(0).tolist() == []
            assert found.row(1).tolist() == ahead.drafts(int(x.max_draft_len[1]))
            n += rng.randint(1, 4)
        drafter.forget(i32([0, 1]))
        assert drafter.num_bytes() == 0


def _step(
    table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    rows: Sequence[int],
    num_tokens: Sequence[int],
    limits: Sequence[int],
    prefixes: Sequence[Sequence[int]] = (),
) -> ProposeInput:
    prefix = DraftTokens(i32([t for p in prefixes for t in p]), offsets([len(p) for p in prefixes]))
    return ProposeInput(
        request_ids=tuple(map(str, rows)),
        table_rows=i32(rows),
        token_table=table,
        num_tokens=i32(num_tokens),
        max_draft_len=i32(limits),
        prefix=prefix if prefixes else None,
    )


# Of 2,000 tokens, how many steps an edited text takes at most with drafts of 16: replaced, left out, put in.
@pytest.mark.parametrize(("rate", "most"), [(0.0, 140), (0.02, 200), (0.1, 700)])
def test_an_edited_text_is_found_again_soon(rate: float, most: int) -> None:
    rng = random.Random(1)
    text = [rng.randrange(200) for _ in range(2000)]
    output = edited(rng, text, rate, 200)
    drafter, table = PredictionDrafter(1), np.zeros((1, 8192), np.int32)
    drafter.begin(0, 1, i32(text))
    table[0, 1 : len(output) + 1] = output
    n, num_steps = 1, 0
    while n < len(output):
        drafts = drafter.propose(_step(table, [0], [n], [16])).row(0).tolist()
        rest = output[n - 1 :]
        n += 1 + next((i for i, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b), len(drafts))
        num_steps += 1
    assert num_steps <= most, num_steps


def test_a_hostile_text_costs_no_more() -> None:
    """One token over and over: every place looks like every other, and each look-up ends soon all the same."""
    drafter, table = PredictionDrafter(1), np.zeros((1, 4096), np.int32)
    drafter.begin(0, 1, np.full(100_000, 7, np.int32))
    assert drafter.num_bytes() <= 32 * 100_000
    table[0, 1::5] = 7
    for n in range(1, 4096):
        drafts = drafter.propose(_step(table, [0], [n], [8]))
        assert len(drafts.token_ids) <= 8


def test_a_request_that_comes_back_is_read_again() -> None:
    text = list(range(50, 150))
    table = np.zeros((1, 256), np.int32)
    table[0, 3:80] = text[:77]
    drafter = PredictionDrafter(1)
    drafter.begin(0, 3, i32(text))
    assert drafter.propose(_step(table, [0], [80], [4])).row(0).tolist() == text[77:81]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": [1]}, "table_rows: expected rows of token_table"),
        ({"num_tokens": [9]}, "num_tokens: expected at most a row"),
        ({"num_tokens": [4]}, "num_tokens: expected no fewer"),
        ({"limits": [-1]}, "max_draft_len: expected >= 0"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Sequence[int]], text: str) -> None:
    drafter, table = PredictionDrafter(1), np.zeros((1, 8), np.int32)
    drafter.begin(0, 2, i32([1, 2, 3]))
    drafter.propose(_step(table, [0], [6], [2]))
    given = {"rows": [0], "num_tokens": [6], "limits": [2], **changes}
    x = _step(table, given["rows"], given["num_tokens"], given["limits"])
    with pytest.raises(ValueError, match=text):
        drafter.propose(x)


@pytest.mark.parametrize("method", ["ngram", "auto"])
def test_requests_with_a_prediction_draft_from_it_under_any_method(method: str) -> None:
    config = SpeculativeConfig(method=method, num_speculative_tokens=6)
    router = MethodDispatcher(config, ProposerContext(2, 64, 1000))
    text = list(range(100, 140))
    router.begin([DraftRequest("a", 0, 2, 2, prediction_token_ids=i32(text)), DraftRequest("b", 1, 2, 2)])
    table = np.zeros((2, 64), np.int32)
    table[:, 2:20] = text[:18]
    drafts = router.propose(_step(table, [0, 1], [20, 20], [6, 6]))
    assert drafts.row(0).tolist() == text[18:24]
    assert len(drafts.row(1)) == 0
    assert drafts.sources is not None
    assert set(drafts.sources.tolist()) == {DraftSource.PREDICTION}
    router.forget(i32([0, 1]))
    router.begin([DraftRequest("c", 0, 2, 2)])
    assert len(router.propose(_step(table, [0], [20], [6])).token_ids) == 0
