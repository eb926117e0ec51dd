"""The JSON-Schema-Test-Suite on guided decoding: what is taken is kept to the letter, the rest is refused."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from fastdeploy_sd.errors import BadRequest
from tests.fuzz.guided_sampling import GuidedSampler
from tests.fuzz.json_schemas import fault_of

pytestmark = pytest.mark.slow

SUITE = Path(__file__).parent / "json_schema_suite"
DRAFTS = {"draft2020-12": jsonschema.Draft202012Validator, "draft7": jsonschema.Draft7Validator}
NUM_OUTPUTS = 1
# Files of the suite in which an output may be other than the suite says, and why.
LOOSER = {
    "optional/format/date.json": "29 February is a day of every year",
    "optional/format/time.json": "any minute may have a leap second",
    "optional/format/date-time.json": "any minute may have a leap second",
    "optional/content.json": "what a string encodes is not looked at",
    "optional/ecmascript-regex.json": "U+FEFF is no white space",
    "optional/non-bmp-regex.json": "characters are code points, not units of UTF-16",
}
STRICTER = {
    "format.json": "formats are kept, not only noted",
    "optional/format/email.json": "no quoted names, no addresses of IPv6",
    "optional/format/ipv6.json": "none that ends like one of IPv4",
    "optional/ecmascript-regex.json": "U+FEFF is no white space",
    "optional/float-overflow.json": "integers have no exponent",
    "ref.json": "words beside $ref hold, as in the drafts since 2019-09",
}
# Word of a schema -> it is refused by name.
REFUSED_WORDS: dict[str, Any] = {
    "not": {},
    "if": {},
    "uniqueItems": True,
    "contains": {},
    "propertyNames": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
}


@pytest.fixture(scope="module")
def sampler() -> GuidedSampler:
    return GuidedSampler.of_demo_model()


def groups(draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, group of cases) of a draft."""
    suite = json.loads((SUITE / f"{draft}.json").read_text())
    return ((name, group) for name, found in suite.items() for group in found if isinstance(group["schema"], dict))


def accepts(sampler: GuidedSampler, matcher: LLMatcher, value: Any) -> bool:
    """Whether a value, as the grammar writes it, is an output."""
    text = json.dumps(value, ensure_ascii=False)
    trial = matcher.deep_copy()
    tokens = sampler.vocabulary.tokenize_str(text)
    return trial.try_consume_tokens(tokens) == len(tokens) and trial.is_accepting()


def other_spellings(value: Any) -> list[Any]:
    """The same value with the names of objects in other orders, and whole numbers without a decimal point."""
    if isinstance(value, dict):
        orders = itertools.permutations(value.items())
        return [dict(zip(order_names(order), parts, strict=True)) for order in orders for parts in spelled(order)]
    if isinstance(value, list):
        return [list(parts) for parts in itertools.product(*map(other_spellings, value))]
    return [int(value)] if isinstance(value, float) and value.is_integer() else [value]


def order_names(order: tuple[tuple[str, Any], ...]) -> list[str]:
    return [name for name, _ in order]


def spelled(order: tuple[tuple[str, Any], ...]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*(other_spellings(value) for _, value in order))


@pytest.mark.parametrize(("draft", "num_taken", "num_cases"), [("draft2020-12", 186, 939), ("draft7", 183, 853)])
def test_cases(sampler: GuidedSampler, draft: str, num_taken: int, num_cases: int) -> None:
    """Valid values are outputs and invalid ones are none; no output that is sampled is invalid."""
    counts: Counter[str] = Counter()
    wrong = []
    for number, (name, group) in enumerate(groups(draft)):
        schema = group["schema"]
        try:
            matcher = sampler.matcher(schema)
        except BadRequest:
            continue
        counts["taken"] += 1
        for case in group["tests"]:
            counts["cases"] += 1
            value, is_valid = case["data"], case["valid"]
            if accepts(sampler, matcher, value):
                is_right = is_valid or name in LOOSER
            else:
                is_right = (
                    not is_valid
                    or name in STRICTER
                    or any(accepts(sampler, matcher, other) for other in other_spellings(value))
                )
            if not is_right:
                wrong.append((name, group["description"], case["description"], schema, value))
        rng = random.Random(number)
        for _ in range(NUM_OUTPUTS if name not in LOOSER else 0):
            output = sampler.sample(matcher.deep_copy(), rng)
            if fault := fault_of(schema, output, DRAFTS[draft]):
                wrong.append((name, group["description"], fault, schema, output))
    assert not wrong, wrong
    assert counts == {"taken": num_taken, "cases": num_cases}, "more or less is claimed than before"


@pytest.mark.parametrize("word", REFUSED_WORDS)
def test_a_word_that_is_not_kept_is_refused_by_name(sampler: GuidedSampler, word: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {word: REFUSED_WORDS[word]}]}}}
    with pytest.raises(BadRequest) as caught:
        sampler.matcher(schema)
    assert word in caught.value.message
