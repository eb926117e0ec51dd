"""The store compiles each grammar once, keeps a bounded number, and says of each when it is ready or why not."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.text.guidance import compiler
from fastdeploy_sd.text.guidance.compiler import GrammarStore
from fastdeploy_sd.text.guidance.vocabulary import make_vocabulary
from fastdeploy_sd.text.tokenizer import Tokenizer
from tests.unit.text.guidance.test_vocabulary import Spelled

DEADLINE_MS = 120_000
A, B = 'start: "a"', 'start: "b"'


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return make_vocabulary(cast(Tokenizer, Spelled()), 5, ())


@pytest.fixture
def store(vocabulary: LLTokenizer) -> Iterator[GrammarStore]:
    with closing(GrammarStore(vocabulary, max_used=2, max_idle=1)) as store:
        yield store


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that the library was given."""
    given: list[str] = []

    def make(vocabulary: LLTokenizer, grammar: str, **options: object) -> LLMatcher:
        given.append(grammar)
        return LLMatcher(vocabulary, grammar, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "LLMatcher", make)
    return given


def wait(store: GrammarStore, *grammars: str) -> None:
    missing = set(grammars)
    poll = select.poll()
    poll.register(store.fd, select.POLLIN)
    while missing:
        assert poll.poll(DEADLINE_MS), f"still not prepared: {missing}"
        missing -= set(store.take_prepared())


def test_a_grammar_becomes_ready_once_and_every_request_has_a_matcher_of_its_own(
    store: GrammarStore, compiled: list[str]
) -> None:
    store.prepare(A)
    store.prepare(A)
    wait(store, A)
    assert store.is_ready(A)
    assert store.take_prepared() == []
    first, second = store.matcher(A), store.matcher(A)
    assert first.consume_token(1)
    assert (first.is_accepting(), second.is_accepting()) == (True, False)
    store.release(A)
    store.release(A)
    store.prepare(A)
    assert store.is_ready(A)
    assert compiled == [A]


def test_a_wrong_grammar_fails_with_the_librarys_reason(store: GrammarStore) -> None:
    store.prepare("start: nothing")
    wait(store, "start: nothing")
    assert not store.is_ready("start: nothing")
    assert 'unknown name: "nothing"' in store.error_of("start: nothing")
    with pytest.raises(InternalError, match="before it was ready"):
        store.matcher("start: nothing")
    store.release("start: nothing")


def test_the_longest_unused_is_forgotten(store: GrammarStore, compiled: list[str]) -> None:
    for grammar in (A, B, A):
        store.prepare(grammar)
        wait(store, grammar) if not store.is_ready(grammar) else None
        store.release(grammar)
    assert compiled == [A, B, A]


def test_no_more_are_compiled_for_requests_than_there_may_be(store: GrammarStore, compiled: list[str]) -> None:
    grammars = [A, B, 'start: "ab"']
    for grammar in grammars:
        store.prepare(grammar)
    wait(store, A, B)
    assert compiled == [A, B]
    store.release(A)
    wait(store, grammars[2])
    assert compiled == grammars


def test_what_nobody_waits_for_any_more_is_not_compiled(
    store: GrammarStore, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, make = threading.Event(), threading.Event(), vars(compiler)["LLMatcher"]

    def wait_and_make(*args: object, **options: object) -> LLMatcher:
        begun.set()
        assert goes_on.wait(DEADLINE_MS / 1e3)
        return make(*args, **options)

    monkeypatch.setattr(compiler, "LLMatcher", wait_and_make)
    store.prepare(A)
    assert begun.wait(DEADLINE_MS / 1e3)  # so the thread takes nothing else until goes_on
    store.prepare(B)
    store.release(B)
    store.release(A)
    store.prepare(B)
    store.release(B)
    store.prepare('start: "ab"')
    goes_on.set()
    wait(store, 'start: "ab"')
    assert B not in compiled


def test_what_nobody_waits_for_any_more_is_not_kept_in_the_queue(store: GrammarStore) -> None:
    for grammar in (A, B):  # no more are compiled
        store.prepare(grammar)
    wait(store, A, B)
    for i in range(100):
        store.prepare(f'start: "a" "b"{{{i}}}')
        store.release(f'start: "a" "b"{{{i}}}')
    assert len(store._queue) == 0


def test_a_grammar_that_has_grown_to_its_limit_is_compiled_anew(vocabulary: LLTokenizer) -> None:
    grammar, limits = "start: /(a|b)*a(a|b){8}/", LLParserLimits(max_lexer_states=100)
    with closing(GrammarStore(vocabulary, limits=limits)) as store:
        store.prepare(grammar)
        wait(store, grammar)
        worn = store.matcher(grammar)
        for token_id in random.Random(0).choices([1, 2], k=2000):
            worn.try_consume_tokens([token_id])
        assert worn.is_error()
        other = store.matcher(grammar)
        other.try_consume_tokens([2, 2, 1, 1, 2, 1])
        other.compute_bitmask()
        assert other.is_error()
        for make in (store.renewed, store.matcher):
            matcher = make(grammar)
            assert matcher.try_consume_tokens([2, 2, 1, 1, 2, 1]) == 6
            assert matcher.compute_bitmask()
            assert not matcher.is_error()
    with pytest.raises(InternalError, match="before it was ready"):
        store.renewed(A)


def test_the_end_does_not_wait_for_what_is_queued(vocabulary: LLTokenizer) -> None:
    store = GrammarStore(vocabulary, max_used=1)
    store.prepare(A)
    store.prepare(B)
    store.close()
    store.close()
    assert not any(thread.name == "fdsd-grammars" for thread in threading.enumerate())
