"""Copies with changes: n-gram and suffix decoding continue after a replaced token, and learn where it does not help."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import DraftTokens

SOURCE = list(range(10, 40))
MAX_LEN = 1000
VOCAB = 1000


class Text:
    """A request whose text is drafted for after any number of tokens."""

    def __init__(self, method: str, follow_copies: bool = True) -> None:
        config = SpeculativeConfig(
            method=method, min_ngram_size=1, follow_copies=follow_copies, suffix_decoding_max_cached_requests=0
        )
        self.proposer = create_method(method, config, ProposerContext(1, MAX_LEN, VOCAB))
        self.proposer.begin([DraftRequest("r", 0, 1, 1)])
        self.table = np.zeros((1, MAX_LEN), np.int32)

    def draft(self, tokens: Sequence[int], k: int, prefix: Sequence[int] = ()) -> list[int]:
        """`tokens`: all so far."""
        self.table[0, : len(tokens)] = tokens
        before = DraftTokens(np.array(prefix, np.int32), np.array([0, len(prefix)], np.int32)) if prefix else None
        table_rows, lengths, budget = (np.array([n], np.int32) for n in (0, len(tokens), k))
        x = ProposeInput(("r",), table_rows, self.table, lengths, budget, prefix=before)
        return self.proposer.propose(x).token_ids.tolist()


Draft = Callable[..., list[int]]
METHODS = ["ngram", "suffix"]


@pytest.fixture(params=METHODS)
def draft(request: pytest.FixtureRequest) -> Draft:
    """What a text is drafted when it is seen for the first time."""

    def run(tokens: Sequence[int], k: int = 3, *, prefix: Sequence[int] = (), follow_copies: bool = True) -> list[int]:
        return Text(request.param, follow_copies).draft(tokens, k, prefix)

    return run


def test_a_copy_continues_after_a_replaced_token(draft: Draft) -> None:
    text = [*SOURCE, 1, *SOURCE[:8], 99]
    assert draft(text) == SOURCE[9:12]
    assert draft([*text, SOURCE[9]], 5) == SOURCE[10:15], "as far as before the change"
    assert draft(text, follow_copies=False) == []


def test_a_copy_continues_after_every_replaced_token(draft: Draft) -> None:
    assert draft([*SOURCE, 1, *SOURCE[:8], 99, *SOURCE[9:11], 98, SOURCE[12], 97]) == SOURCE[14:17]


def test_a_short_copy_ends_at_a_replaced_token(draft: Draft) -> None:
    assert draft([*SOURCE, 1, *SOURCE[:5], 99]) == []
    assert draft([*SOURCE, 1, *SOURCE[:6], 99]) == SOURCE[7:10]


def test_two_replaced_tokens_end_a_copy(draft: Draft) -> None:
    assert draft([*SOURCE, 1, *SOURCE[:8], 99, 98]) == []
    assert draft([*SOURCE, 1, *SOURCE[:8], 99, 98, 97]) == []


def test_a_match_elsewhere_that_says_more_is_preferred(draft: Draft) -> None:
    assert draft([*SOURCE, 6, 99, 41, 1, *SOURCE[:8], 99], 1) == [SOURCE[9]], "a single token elsewhere says less"
    assert draft([*SOURCE, 5, 6, 99, 41, 2, *SOURCE[:8], SOURCE[8], 5, 6, 99], 1) == [41]
    assert draft([*SOURCE, SOURCE[7], 99, 41, 1, *SOURCE[:8], 99], 1) == [41], "two tokens against none after it"


def test_changes_that_are_no_replaced_tokens_use_up_the_credit(draft: Draft) -> None:
    """The first one has the benefit of the doubt, and each replaced token gives it back."""
    inserted = [*SOURCE, 1, *SOURCE[:8], 99, 98, 97, *SOURCE[8:16]]
    assert draft([*inserted, 96]) == []
    regained = [*inserted, 96, *SOURCE[17:25]]
    assert draft([*regained, 95]) == SOURCE[26:29]


@pytest.mark.parametrize(("num_inserted", "is_drafted"), [(3, True), (4, False)])
def test_credit_is_limited(draft: Draft, num_inserted: int, is_drafted: bool) -> None:
    """However many tokens were replaced, a few other changes show that the text is changed in another way now."""
    source = list(range(10, 400))
    text = [*source, 1]
    for i in range(10):
        text += [*source[8 * i : 8 * i + 7], 600 + i]
    for i in range(10, 10 + num_inserted):
        text += [*source[8 * i : 8 * i + 8], 700 + i, 800 + i, 900 + i]
    assert draft([*text, *source[160:168], 500]) == (source[169:172] if is_drafted else [])


@pytest.mark.parametrize(
    ("changed", "num_left_out"), [([99, 98], 0), ([99, 98], 1), ([99, 98], 2), ([99, 98, 97, 96], 3), ([99], 0)]
)
def test_ngram_rejoins_a_copy_after_a_few_changed_tokens(changed: list[int], num_left_out: int) -> None:
    """One token is enough: it is looked for where the copy broke only. Without that, two of them are looked up."""
    text = [SOURCE[8 + num_left_out], 400, *SOURCE, 401, *SOURCE[:8], *changed, SOURCE[8 + num_left_out]]
    assert Text("ngram").draft(text, 3) == SOURCE[9 + num_left_out : 12 + num_left_out]
    assert Text("ngram", follow_copies=False).draft(text, 3) != SOURCE[9 + num_left_out : 12 + num_left_out]


@pytest.mark.parametrize(("changed", "num_left_out"), [([99, 98, 97, 96, 95], 0), ([99, 98], 4)])
def test_ngram_does_not_rejoin_a_copy_after_many_changed_tokens(changed: list[int], num_left_out: int) -> None:
    place = 8 + num_left_out
    text = [*SOURCE, SOURCE[place], 400, 401, 402, *SOURCE[:8], *changed, SOURCE[place]]
    assert Text("ngram").draft(text, 3) == [400, 401]


def test_a_prefix_may_be_the_replaced_token(draft: Draft) -> None:
    assert draft([*SOURCE, 1, *SOURCE[:8]], prefix=[99]) == SOURCE[9:12]
    assert draft([*SOURCE, 1, *SOURCE[:8]], prefix=[99, SOURCE[9]]) == SOURCE[10:13]
    assert draft([*SOURCE, 1, *SOURCE[:8]], prefix=[99, 98]) == []


def test_a_long_copy_is_preferred_to_a_later_place_that_looks_the_same(draft: Draft) -> None:
    text = [*SOURCE, 1, *SOURCE[4:10], 77, 2, *SOURCE[:10]]
    assert draft(text, 2) == SOURCE[10:12]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_do_not_depend_on_how_the_text_came(method: str) -> None:
    """A request that comes back after preemption is read at once, a running one token by token."""
    rng = np.random.default_rng(5)
    num_changed = 0
    for _ in range(20):
        text: list[int] = rng.integers(0, 30, 60).tolist()
        for _ in range(4):
            start = int(rng.integers(0, len(text) - 20))
            text += [token if rng.random() < 0.9 else int(rng.integers(0, 30)) for token in text[start : start + 20]]
        running, plain = Text(method), Text(method, follow_copies=False)
        for n in range(40, len(text)):
            drafts = running.draft(text[:n], 4)
            num_changed += drafts != plain.draft(text[:n], 4)
            if n % 7 == 0:
                assert drafts == Text(method).draft(text[:n], 4)
    assert num_changed > 20
