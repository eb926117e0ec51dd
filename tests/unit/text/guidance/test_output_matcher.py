from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from fastdeploy_sd.config import ModelConfig
from fastdeploy_sd.text.guidance.output_matcher import OutputMatcher, WornError
from fastdeploy_sd.text.guidance.vocabulary import make_vocabulary
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer

# Complete behind "ab" in the library's three ways: nothing may follow, something may, and a bounded number may.
ENDS_ALONE, GOES_ON, BOUNDED = 'start: "ab"', 'start: "ab" "c"*', 'start: "ab" "c"{0,2}'
GRAMMARS = [ENDS_ALONE, GOES_ON, BOUNDED]
FREE = 7


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelConfig(model="demo").path)


@functools.cache
def vocabulary() -> LLTokenizer:
    return make_vocabulary(tokenizer(), 4096, ())


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


END = tokenizer().eos_token_ids[0]


def matcher_of(grammar: str, output: str = "") -> OutputMatcher:
    def make() -> LLMatcher:
        return LLMatcher(vocabulary(), grammar)

    matcher = OutputMatcher(make(), tokenizer().eos_token_ids, make)
    matcher.consume(ids(output))
    assert not matcher.error
    return matcher


def bits(matcher: OutputMatcher) -> np.ndarray:
    found = np.zeros((1, 128), np.int32)
    fill_next_token_bitmask(matcher._matcher, found)
    return found


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize(
    ("tail", "num_allowed"), [([], 0), ([END], 1), ([END, END], 1), ([END, FREE], 1), ([FREE], 0), ([FREE, END], 0)]
)
def test_an_end_is_a_token_as_any_other_and_nothing_follows_it(grammar: str, tail: list[int], num_allowed: int) -> None:
    matcher = matcher_of(grammar)
    before = bits(matcher)
    assert len(matcher.allowed([*ids("ab"), *tail])) == len(ids("ab")) + num_allowed
    assert (bits(matcher) == before).all()
    matcher.consume(ids("ab"))
    assert len(matcher.allowed(tail)) == num_allowed
    matcher.consume(tail)
    assert bool(matcher.error) == (tail[:1] == [FREE])
    assert len(matcher.allowed([END])) == (not tail)


def test_an_end_in_the_middle_is_refused() -> None:
    matcher = matcher_of(BOUNDED)
    assert len(matcher.allowed([END])) == len(matcher.allowed([*ids("a"), END])) - 1 == 0
    matcher.consume([END])
    assert "none that the grammar allows" in matcher.error
    assert len(matcher.allowed(ids("ab"))) == 0
    assert matcher.forced(3) == []


@pytest.mark.parametrize("limit", range(8))
def test_forced_tokens_are_the_text_that_must_follow_and_the_end(limit: int) -> None:
    matcher = matcher_of('start: "{\\"an_answer\\":" /[0-9]/ "}"')
    before = bits(matcher)
    whole = ids('{"an_answer":')
    assert matcher.forced(limit) == whole[:limit]
    assert (bits(matcher) == before).all()
    assert len(matcher.allowed(matcher.forced(limit))) == min(limit, len(whole))
    matcher.consume([*whole, *ids("4")])
    assert matcher.forced(limit) == [*ids("}"), END][:limit]
    matcher.consume(ids("}"))
    assert matcher.forced(limit) == [END][:limit]
    matcher.consume([END])
    assert matcher.forced(limit) == []


def test_where_something_may_follow_nothing_is_forced() -> None:
    assert matcher_of(GOES_ON, "ab").forced(4) == []


def test_forced_tokens_are_looked_for_once_while_the_output_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = matcher_of('start: "' + 40 * "abc " + '" /[0-9]/')
    whole = matcher.forced(1000)
    assert len(whole) > 20
    matcher.forced(4)
    monkeypatch.setattr(matcher, "_matcher", Unasked(matcher._matcher))
    for begin in range(0, len(whole) - 8, 2):
        assert matcher.forced(4) == whole[begin : begin + 4]
        matcher.consume(whole[begin : begin + 2])
    monkeypatch.undo()
    assert matcher.forced(1000) == whole[begin + 2 :]
    matcher = matcher_of('start: "' + 40 * "abc " + '" /[0-9]/')
    assert matcher.forced(4) != ids("a") + matcher.forced(4)[1:]
    matcher.consume(ids("a"))
    assert len(matcher.allowed(matcher.forced(4))) == 4


class Unasked:
    """A matcher that must not be asked what is forced."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def is_error(self) -> bool:
        return False

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        return int(self._matcher.try_consume_tokens(token_ids))


# Its automaton has a state for each way to write 8 letters.
WIDE = "start: /(a|b)*a(a|b){8}c/"


def small(grammar: str) -> LLMatcher:
    """A matcher with a small limit, which holds from the first bits on."""
    matcher = LLMatcher(vocabulary(), grammar, log_level=0, limits=LLParserLimits(max_lexer_states=300))
    matcher.compute_bitmask()
    return matcher


def test_what_other_requests_wrote_ends_none() -> None:
    """Each of them walks through states of its own, many more together than the limit."""
    base = [small(WIDE)]
    truth = LLMatcher(vocabulary(), WIDE)

    def renewed() -> LLMatcher:
        base.append(small(WIDE))
        return base[-1].deep_copy()

    for i in range(40):
        text = "".join(random.Random(i).choices("ab", k=60))
        matcher = OutputMatcher(base[-1].deep_copy(), (END,), renewed)
        exact = truth.deep_copy()
        for token_id in ids(text):
            try:
                matcher.consume([token_id])
            except WornError:
                matcher.consume([*matcher.renew(), token_id])
            assert exact.consume_token(token_id)
            assert not matcher.error
    assert len(base) > 2


def test_each_branch_of_a_tree_follows_its_own_path() -> None:
    """Nothing follows an end or a refused token; a sibling after it is not affected."""
    matcher = matcher_of(BOUNDED)
    [a], [b] = ids("a"), ids("b")
    chain = matcher.allowed([a, b, END])
    assert chain == [0, 1, 2]
    assert matcher.allowed([FREE, a, a, b, b, END], [-1, 0, -1, 2, 0, 3]) == [2, 3, 5]
