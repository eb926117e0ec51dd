"""A guided answer begins behind the thinking, whatever is thought; and thinking ends where its limit says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.guidance.limits import limits_of
from fastdeploy_sd.text.guidance.reasoning import ThinkingGrammar
from fastdeploy_sd.text.guidance.vocabulary import make_vocabulary
from fastdeploy_sd.text.reasoning import ThoughtSplitter
from fastdeploy_sd.text.reasoning_formats import FORMATS, Start
from fastdeploy_sd.text.tokenizer import Tokenizer
from tests.unit.text.vocabularies import golden_tokenizer, thinking_tokenizer

EOS, VOCAB_SIZE = 2, 4100
FORM = FORMATS["qwen3"]
MAYBE, INSIDE, BEHIND = Start.MAYBE, Start.INSIDE, Start.ANSWER
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWERS = {
    f"start: %json {json.dumps(SCHEMA)}": ['{"a": 1}', '{\n"a":23}'],
    "start: /[a<]{2,4}/": ["a<a", "<<"],
    'start: "x" word+\nword: "y" | "z"\n%ignore /[ \\n]+/': ["x y\nz"],
}


class Model:
    """A vocabulary with or without marks, and matchers over it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.thinking = ThinkingGrammar(FORM, tokenizer, (EOS,))
        self._vocabulary: LLTokenizer = make_vocabulary(tokenizer, vocab_size, (EOS,))

    def takes(self, grammar: str, text: str) -> bool:
        """Whether a text may be written, marks as their tokens, and the request may end behind it."""
        matcher = self.matcher(grammar)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return False
        return bool(matcher.is_accepting() and (matcher.is_stopped() or matcher.try_consume_tokens([EOS])))

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, grammar, limits=limits_of(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher


@pytest.fixture(scope="module", params=["plain", "shown", "hidden"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Marks are several tokens, or one that texts show, or one that they do not."""
    if request.param == "plain":
        return Model(golden_tokenizer(), VOCAB_SIZE)
    return Model(thinking_tokenizer(tmp_path_factory.mktemp("t"), is_special=request.param == "hidden"), VOCAB_SIZE)


@pytest.mark.parametrize(("grammar", "answers"), ANSWERS.items())
def test_the_answer_begins_behind_the_thinking(model: Model, grammar: str, answers: list[str]) -> None:
    inside, maybe = (model.thinking.wrap(grammar, start) for start in (INSIDE, MAYBE))
    assert model.thinking.wrap(grammar, BEHIND) == grammar
    for answer in answers:
        for thought in ("", "\nSo: </ thi {} é\n\n"):
            for blanks in ("", "\n\n"):
                text = f"{thought}</think>{blanks}{answer}"
                assert model.takes(inside, text), text
                assert model.takes(maybe, f"<think>{text}"), text
                assert model.takes(maybe, f"\n<think>{text}"), text
        assert model.takes(maybe, answer), "without thinking"
        assert not model.takes(inside, f"x</think>{answer}?"), "the grammar holds"
        assert not model.takes(maybe, f"<think>x</think>{answer}?")
    assert not model.takes(inside, "no end")
    assert not model.takes(inside, "x</think>"), "an answer must follow"


def test_grammar_and_splitter_see_the_same_end() -> None:
    """Spelled in ordinary tokens a closing mark ends the thinking for both, or cannot be written."""
    grammar = "start: /a+/"
    model = Model(golden_tokenizer(), VOCAB_SIZE)
    wrapped = model.thinking.wrap(grammar, INSIDE)
    assert model.takes(wrapped, "x</think>aaa")
    assert not model.takes(wrapped, "x</think>b</think>aaa")
    assert ThoughtSplitter(FORM, INSIDE).push("x</think>aaa") == ("x", "aaa")


def test_a_hidden_mark_is_not_spelled_out(tmp_path: Path) -> None:
    model = Model(thinking_tokenizer(tmp_path, is_special=True), VOCAB_SIZE)
    matcher = model.matcher(model.thinking.wrap("start: /a+/", INSIDE))
    spelled = golden_tokenizer().encode("x</think>aaa", add_special_tokens=False)
    assert matcher.try_consume_tokens(spelled) < len(spelled)


@pytest.mark.parametrize("is_special", [False, True])
def test_a_limit_counts_tokens_and_forces_the_closing_mark(tmp_path: Path, is_special: bool) -> None:
    model = Model(thinking_tokenizer(tmp_path, is_special=is_special), VOCAB_SIZE)
    closing = model.tokenizer.encode("</think>", add_special_tokens=False)
    for grammar, answer in (("", "anything <think> </think>"), ("start: /[a-c]+/", "abc")):
        for start, opening in ((INSIDE, ""), (MAYBE, "<think>")):
            wrapped = model.thinking.wrap(grammar, start, 3)
            matcher = model.matcher(wrapped)
            if opening:
                assert matcher.consume_tokens(model.tokenizer.encode(opening, add_special_tokens=False))
            assert matcher.try_consume_tokens([EOS]) == 0, "no answer without an end of the thinking"
            tokens = [300, 301, 302, 303]
            assert matcher.try_consume_tokens(tokens) == 3
            left = np.flatnonzero(np.unpackbits(_mask(matcher), bitorder="little")).tolist()
            assert {*left} >= {*closing}
            assert all("</think>".startswith(model.tokenizer.decode([i], skip_hidden=False)) for i in left), "forced"
            assert matcher.rollback(3), "drafts may be rejected"
            assert matcher.consume_tokens(closing)
            assert model.takes(wrapped, f"{opening}</think>{answer}")
        if not grammar:
            assert model.takes(wrapped, "no thinking at all"), "where the model opens it itself"
        at_once = model.matcher(model.thinking.wrap(grammar, INSIDE, 0))
        assert at_once.try_consume_tokens([300]) == 0
        assert at_once.consume_tokens(closing)
        assert model.thinking.wrap(grammar, BEHIND, 3) == grammar
    assert model.thinking.wrap("", INSIDE) == ""


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [None, 4])
@pytest.mark.parametrize("start", [INSIDE, MAYBE])
def test_rolled_back_a_matcher_is_as_if_it_had_not_gone_on(model: Model, start: Start, max_tokens: int | None) -> None:
    marks = [model.tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>")]
    if max_tokens is not None and len(marks[0]) > 1:
        pytest.skip("a limit needs marks that are tokens")
    rng = random.Random(5)
    for grammar in ("start: /[a-z]{3}/", "") if max_tokens is not None else ("start: /[a-z]{3}/",):
        wrapped = model.thinking.wrap(grammar, start, max_tokens)
        for _ in range(60):
            matcher, taken = model.matcher(wrapped), list[int]()
            for _ in range(5):
                for _ in range(rng.randint(1, 3)):
                    token_id = rng.choice([rng.choice(marks)[0], *_allowed(matcher, rng)])
                    taken += [token_id] * matcher.try_consume_tokens([token_id])
                num_back = rng.randint(0, min(2, len(taken)))
                if num_back:
                    assert matcher.rollback(num_back), matcher.get_error()
                    del taken[-num_back:]
                other = model.matcher(wrapped)
                assert other.try_consume_tokens(taken) == len(taken)
                assert (_mask(matcher) == _mask(other)).all(), taken


def _mask(matcher: LLMatcher) -> Any:
    mask = allocate_token_bitmask(1, VOCAB_SIZE)
    fill_next_token_bitmask(matcher, mask, 0)
    return mask[0].view(np.uint8)


def _allowed(matcher: LLMatcher, rng: random.Random) -> list[int]:
    """Two tokens that may come next, if any may but the end."""
    allowed = set(np.flatnonzero(np.unpackbits(_mask(matcher), bitorder="little")).tolist()) - {EOS}
    return rng.choices(sorted(allowed), k=2) if allowed else []


def test_a_limit_needs_marks_that_are_tokens() -> None:
    model = Model(golden_tokenizer(), VOCAB_SIZE)
    with pytest.raises(BadRequest, match=r"reasoning_max_tokens: not supported: this model has no single tokens for"):
        model.thinking.wrap("", INSIDE, 3)


def test_long_thinking_stays_within_the_librarys_limits(tmp_path: Path) -> None:
    model = Model(thinking_tokenizer(tmp_path, is_special=False), VOCAB_SIZE)
    tokens = [300 + i % 3000 for i in range(5000)]
    for max_tokens in (None, 6000, (1 << 31) - 1):
        matcher = model.matcher(model.thinking.wrap("start: /a+/", INSIDE, max_tokens))
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        assert matcher.consume_tokens(model.tokenizer.encode("</think>aa", add_special_tokens=False))
        assert matcher.is_accepting()
