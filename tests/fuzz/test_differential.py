"""A few dozen differential trials, and that a difference is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.differential import PASSES, Runner, difference
from tests.fuzz.trial_requests import RequestMaker
from tests.fuzz.trial_ways import WAYS
from tests.server.answers import Answer, Choice

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_other_ways_give_the_bytes_of_plain_decoding() -> None:
    runner = Runner("demo", {}, "python -m tests.fuzz.differential")
    runner.run(seed=30, groups=[0], ways=[WAYS["ngram"]])
    print(runner.report)
    assert not runner.report.findings, runner.report
    assert runner.report.total("trials") == PASSES * runner.report.total("requests") > 0
    assert runner.report.total("accepted drafts") > 0


def test_a_request_depends_on_its_number_only() -> None:
    assert RequestMaker(1, 7).make() == RequestMaker(1, 7).make()
    assert RequestMaker(1, 7).make() != RequestMaker(1, 8).make() != RequestMaker(2, 8).make()


def test_requests_have_every_feature() -> None:
    bodies = [RequestMaker(0, number).make().body for number in range(600)]
    assert {name for body in bodies for name in body} >= {
        "bad_words", "echo", "frequency_penalty", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
        "ignore_eos", "logit_bias", "logprobs", "messages", "min_p", "min_tokens", "prediction", "presence_penalty",
        "prompt", "repetition_penalty", "response_format", "stop", "stop_token_ids", "tools", "top_k", "top_p",
    }  # fmt: skip
    assert {body["n"] for body in bodies} == {1, 2, 3}


def answer(**fields: Any) -> Answer:
    """A whole answer of one choice, with some fields of it or of the choice."""
    choice = Choice("ab", [1, 2], {"tokens": ["a", "b"]}, ["stop", None], [["f", "{}"]])
    of_choice = {name: value for name, value in fields.items() if hasattr(choice, name)}
    of_answer = {name: value for name, value in fields.items() if name not in of_choice}
    whole = Answer(200, {0: replace(choice, **of_choice)}, [3, 2], is_done=True)
    return replace(whole, **of_answer)


ERROR = {"type": "invalid_request_error", "message": "x"}


@pytest.mark.parametrize(
    ("got", "what"),
    [
        (answer(), ""),
        (answer(num_preemptions=2), ""),
        (answer(text="ax"), "choice 0, text: from 1 on expected 'b', got 'x'"),
        (answer(token_ids=[1]), "choice 0, token_ids: from 1 on expected [2], got []"),
        (answer(logprobs={"tokens": ["a", "c"]}), "choice 0, logprobs: tokens: from 1 on expected ['b'], got ['c']"),
        (answer(logprobs={}), "choice 0, logprobs: tokens: from 0 on expected ['a', 'b'], got []"),
        (answer(ends=["stop", 5]), "choice 0, ends: from 1 on expected [None], got [5]"),
        (answer(calls=[]), "choice 0, calls: from 0 on expected [['f', '{}']], got []"),
        (answer(usage=[3, 1]), "usage: expected [3, 2], got [3, 1]"),
        (answer(choices={}), "choices: expected [0], got []"),
        (answer(broken="cut off"), "the connection: cut off"),
        (answer(error=ERROR), f"error: expected None, got {ERROR}"),
    ],
)
def test_a_difference_is_found(got: Answer, what: str) -> None:
    assert difference(answer(), got) == what


def test_before_the_same_error_one_answer_may_be_shorter() -> None:
    expected = answer(error=ERROR, ends=[])
    assert not difference(expected, answer(error=ERROR, choices={}))
    assert not difference(expected, answer(error=ERROR, text="a", token_ids=[1], logprobs={}, calls=[], ends=[]))
    assert difference(expected, answer(error=ERROR, text="x", token_ids=[9], logprobs={}, calls=[], ends=[]))
