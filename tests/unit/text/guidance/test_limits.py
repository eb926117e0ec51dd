"""What is taken can be followed to its end; what is too large for that is refused before anything is generated."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.guidance.grammar import StructuredOutputs, grammar_of, json_grammar
from fastdeploy_sd.text.guidance.limits import OWN_LIMITS, SCHEMA_LIMITS, library_error, limits_of
from tests.unit.text.guidance.test_output_matcher import vocabulary

NULLABLE, WHOLE = {"type": ["string", "null"]}, {"type": "integer"}


def optional(count: int, member: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"f{i}": member for i in range(count)}, "additionalProperties": False}


def lark(text: str) -> str:
    return grammar_of(StructuredOutputs(grammar=text), "structured_outputs")


SEQUENCE = "start: " + " ".join(f"r{i}?" for i in range(400)) + "\n" + "\n".join(f'r{i}: "x{i} "' for i in range(400))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (json_grammar(optional(1000, NULLABLE), "schema"), '{"f0": null, "f3": "a", "f999": null}'),
        (json_grammar(optional(1000, {}), "schema"), '{"f0": [1], "f3": {"a": 1}, "f998": true}'),
        (lark(SEQUENCE), "x0 x3 x398 "),
    ],
    ids=["nullable", "any", "rules"],
)
def test_a_thousand_optional_members_and_four_hundred_rules_are_followed(grammar: str, text: str) -> None:
    GrammarChecker(vocabulary()).verify(grammar, "response_format")
    matcher = LLMatcher(vocabulary(), grammar, log_level=0, limits=limits_of(grammar))
    for token_id in vocabulary().tokenize_str(text):
        state = matcher.deep_copy()
        state.compute_ff_tokens()
        assert state.compute_bitmask()
        assert matcher.try_consume_tokens([token_id]) == 1
        assert (state.get_error(), matcher.get_error()) == ("", "")
    assert matcher.is_accepting()


@pytest.mark.parametrize("seed", range(4))
def test_a_large_multiple_is_followed_whatever_is_drawn(seed: int) -> None:
    schema = {"type": "integer", "multipleOf": 9973, "minimum": 0, "maximum": 2**50}
    grammar, choice, text = json_grammar(schema, "schema"), random.Random(seed), b""
    matcher = LLMatcher(vocabulary(), grammar, log_level=0, limits=limits_of(grammar))
    while not matcher.is_stopped():
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        token_id = int(choice.choice(allowed))
        assert matcher.consume_token(token_id), library_error(matcher.get_error())
        if token_id not in vocabulary().eos_tokens:
            text += vocabulary().decode_bytes([token_id])
    assert json.loads(text) % 9973 == 0


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"anyOf": [optional(500 + i, WHOLE) for i in range(3)]}, "schema"),
        lark("start: " + " ".join("r?" for _ in range(400)) + '\nr: "x"\n'),
    ],
    ids=["objects", "rules"],
)
def test_what_is_too_large_is_refused_at_once_in_words_about_it(grammar: str) -> None:
    with pytest.raises(
        BadRequest, match=r"^response_format: expected .*, got: more alternatives are open at one place"
    ):
        GrammarChecker(vocabulary()).verify(grammar, "response_format")


def test_a_clients_own_grammar_never_has_the_limits_of_a_schema() -> None:
    assert limits_of(json_grammar({"pattern": '/"#', "const": "//"}, "schema")) is SCHEMA_LIMITS
    for text in ('start: "%json"', 'start: "a" // %json {}', 'start: "a" # %json {}', r"start: /\/%json {}/"):
        assert limits_of(lark(text)) is OWN_LIMITS


@pytest.mark.parametrize(
    ("text", "forbidden", "is_refused"),
    [
        ('start: "<call>\\n{" /[a-z]+/ "}"', "\n", True),
        ('start: "<call>\\n{" /[a-z]+/ "}"', "x", False),
        ('start: "<call>" /[ \\n]/ "{" /[a-z]+/ "}"', "\n", False),
        ('start: /[a-z]+/ "\\n"', "\n", False),  # only its end, as far as anybody can tell
        ('start: "yes" | "no"', "zq", False),
    ],
)
def test_forbidden_tokens_without_which_the_form_cannot_begin_are_refused(
    text: str, forbidden: str, is_refused: bool
) -> None:
    containing = [i for i in range(4096) if forbidden.encode() in vocabulary().decode_bytes([i])]
    checker, message = GrammarChecker(vocabulary()), "bad_words: expected none that the form of the answer needs"
    with pytest.raises(BadRequest, match=message) if is_refused else nullcontext():
        checker.verify(lark(text), "bad_words", containing)
