"""What clients ask for becomes a grammar that derives exactly that; what cannot be kept is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.requests import MAX_GRAMMAR_CHARS
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.guidance.grammar import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_GRAMMAR_TEXT_CHARS,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_CHARS,
    StructuredOutputs,
    grammar_of,
)
from fastdeploy_sd.text.guidance.limits import library_error, limits_of
from fastdeploy_sd.text.guidance.vocabulary import load_vocabulary
from fastdeploy_sd.text.tokenizer import Tokenizer
from tests.unit.text.guidance.test_vocabulary import DEMO, Spelled

FIELD = "structured_outputs"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
PERSON_TEXT = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(DEMO, "auto", 4096, ())


@pytest.fixture(scope="module")
def derives(vocabulary: LLTokenizer) -> Callable[[str, str], bool]:
    """Whether a grammar derives a text."""

    def check(grammar: str, text: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar, limits=limits_of(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = vocabulary.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


def outputs(**given: Any) -> StructuredOutputs:
    return StructuredOutputs(**given)


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        (
            outputs(json=PERSON),
            ['{"name": "Ada", "ages": [1, 22]}', '{"name": "é\\n", "ages": []}'],
            ['{"name":"Ada","ages":[]}', '{"ages": [], "name": ""}', '{"name": "Ada"}', "[]"],
        ),
        (outputs(json=PERSON_TEXT), ['{"a": 1}'], ['{"a": 2}', "{}"]),
        (outputs(json=PERSON, disable_any_whitespace=True), ['{"name":"Ada","ages":[1,2]}'], ['{"name": "Ada"}']),
        (outputs(json=PERSON, whitespace_pattern=r"[ \n]{0,2}"), ['{ "name":"A" ,\n\n"ages":[ ]}'], ['{   "name":']),
        (outputs(json_object=True), ["{}", '{"a": {"b": [null, true]}}'], ["[]", "1", '{"a"}']),
        (outputs(regex=r"[a-c]+/\d{2}"), ["abc/12"], ["abc/1", "abc/123", "xabc/12"]),
        (outputs(regex=r"^(yes|no)$"), ["yes", "no"], ["yes\n", "maybe"]),
        (outputs(choice=['say "hi"', "a/b\n", "é"]), ['say "hi"', "a/b\n", "é"], ["say", "é!"]),
        (outputs(grammar='start: "a" rest\nrest: /[0-9]+/ | "//"  // a % comment\n'), ["a12", "a//"], ["a", "b1"]),
        (outputs(grammar='root ::= "x" tail\ntail ::= [0-9]+ | "%json"'), ["x42", "x%json"], ["x", "xy"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "",
)
def test_it_derives_what_was_asked_for_and_nothing_else(
    derives: Callable[[str, str], bool], asked: StructuredOutputs, right: list[str], wrong: list[str]
) -> None:
    grammar = grammar_of(asked, FIELD)
    assert "start:" in grammar
    assert [text for text in right if not derives(grammar, text)] == []
    assert [text for text in wrong if derives(grammar, text)] == []


def test_all_but_the_values_of_an_object_is_forced(vocabulary: LLTokenizer) -> None:
    matcher = LLMatcher(vocabulary, grammar_of(outputs(json=PERSON), FIELD))
    assert matcher.compute_ff_bytes() == b'{"name": "'
    assert matcher.consume_tokens(vocabulary.tokenize_str('{"name": "A"'))
    assert matcher.compute_ff_bytes() == b', "ages": ['


def test_what_is_within_the_limits_fits_into_a_request() -> None:
    for asked in (
        outputs(choice=["é" * (MAX_CHOICE_CHARS // 4 // MAX_CHOICES)] * MAX_CHOICES),
        outputs(regex="/" * MAX_REGEX_CHARS),
        outputs(grammar="é" * MAX_GRAMMAR_TEXT_CHARS),
        outputs(json={"const": "x" * (MAX_SCHEMA_CHARS - 200)}),
    ):
        assert len(grammar_of(asked, FIELD)) < MAX_GRAMMAR_CHARS


@pytest.mark.parametrize(
    ("field", "asked", "message"),
    [
        (FIELD, outputs(), f"{FIELD}: expected exactly one of json, json_object, regex, choice, grammar, got none"),
        (FIELD, outputs(json={}, regex="a"), "got json, regex"),
        ("guided_json", outputs(json="{"), "guided_json: expected JSON, got Expecting property name"),
        ("guided_json", outputs(json="[1]"), "guided_json: expected a JSON schema (an object), got [1]"),
        ("guided_json", outputs(json=3), "guided_json: expected a JSON schema (an object), got 3"),
        (
            "guided_json",
            outputs(json={"x-guidance": {"lenient": True}}),
            "guided_json: expected no x-guidance, got",
        ),
        ("guided_json", outputs(json={"minimum": float("inf")}), "guided_json: expected JSON, got Out of range"),
        ("guided_json", outputs(json={"const": "x" * MAX_SCHEMA_CHARS}), f"expected at most {MAX_SCHEMA_CHARS}"),
        ("guided_json", outputs(json={"type": "integer", "multipleOf": 999983}), "guided_json/multipleOf: expected"),
        (FIELD, outputs(json_object=1), f"{FIELD}.json_object: expected true, got 1"),
        (FIELD, outputs(regex=""), f"{FIELD}.regex: expected text, got ''"),
        (FIELD, outputs(regex="x" * (MAX_REGEX_CHARS + 1)), f"{FIELD}.regex: expected at most {MAX_REGEX_CHARS}"),
        (FIELD, outputs(choice="ab"), f"{FIELD}.choice: expected a list of 1..{MAX_CHOICES} texts, got 'ab'"),
        (FIELD, outputs(choice=["a", ""]), f"{FIELD}.choice[1]: expected a text of 1 character or more, got ''"),
        (FIELD, outputs(choice=["\ud800"]), f"{FIELD}.choice[0]: expected a text without lone surrogates"),
        (FIELD, outputs(choice=["a"] * (MAX_CHOICES + 1)), f"expected a list of 1..{MAX_CHOICES} texts"),
        (FIELD, outputs(choice=["a" * (MAX_CHOICE_CHARS + 1)]), f"expected at most {MAX_CHOICE_CHARS} characters"),
        ("guided_grammar", outputs(grammar='{"grammars": []}'), "guided_grammar: expected a grammar in the syntax of"),
        ("guided_grammar", outputs(grammar="start: %json {}"), "expected no directives but %ignore, got %json"),
        ("guided_grammar", outputs(grammar='start: "a" @other'), "expected no directives but %ignore, got @"),
        ("guided_grammar", outputs(grammar='start: <[5]> "<["'), "expected special tokens by their names, got ids"),
        ("guided_grammar", outputs(grammar="root ::= ("), "guided_grammar: expected a grammar in the syntax of GBNF"),
        (
            "guided_regex",
            outputs(regex="x((ab){100}[c}{5}]){1,100}"),
            "guided_regex: expected a regular expression",
        ),
        ("guided_json", outputs(json={"items": {"pattern": "a{20001}"}}), "guided_json: expected a regular expression"),
        (
            "guided_grammar",
            outputs(grammar="start: /(a){99999999999}/"),
            "guided_grammar: expected a regular",
        ),
        (
            "guided_grammar",
            outputs(grammar="start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000 // 10))),
            "guided_grammar: expected at most 500 rules, got 2001",
        ),
        (FIELD, outputs(regex="a", whitespace_pattern=" "), f"{FIELD}.whitespace_pattern: expected none with"),
        (FIELD, outputs(json={}, disable_any_whitespace="no"), f"{FIELD}.disable_any_whitespace: expected true or"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(field: str, asked: StructuredOutputs, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(asked, field)
    assert message in caught.value.message
    assert caught.value.param == field


INT = {"type": "integer"}
A_AND_B: dict[str, Any] = {"properties": {"a": INT, "b": INT}, "required": ["a"]}
NESTED: dict[str, Any] = {
    "$defs": {"P": {"type": "object", "properties": {"x": INT}}},
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/P"}, "l": {"type": "array", "items": {"$ref": "#/$defs/P"}}},
}
UNION = {"oneOf": [{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "b")]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object"} | A_AND_B, ['{"a": 1}', '{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}', "{}"]),
        ({"type": "object", "additionalProperties": True} | A_AND_B, ['{"a": 1, "c": [2]}'], ['{"c": 1}']),
        ({"type": "object", "additionalProperties": INT} | A_AND_B, ['{"a": 1, "c": 2}'], ['{"a": 1, "c": "d"}']),
        (NESTED, ['{"p": {"x": 1}, "l": [{}]}', "{}"], ['{"p": {"y": 1}}', '{"l": [{"x": 1, "y": 2}]}', '{"q": 1}']),
        (UNION | {"type": "object"}, ['{"k": "a"}', '{"k": "b"}'], ['{"k": "a", "c": 1}']),
        (
            {"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": A_AND_B | {"type": "object"}}},
            ['{"a": 1}'],
            ['{"a": 1, "c": 2}'],
        ),
        ({"type": "object", "minProperties": 2} | A_AND_B, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "c": 2}']),
        # Objects that say nothing of their names, and those that several places describe, stay open.
        ({"type": "object"}, ['{"a": 1}', "{}"], ["1"]),
        ({"type": "object", "required": ["z"]} | {"properties": {"a": INT}}, ['{"a": 1, "z": 2}'], ['{"a": 1}']),
        (
            {"allOf": [{"type": "object"} | A_AND_B, {"type": "object", "properties": {"c": INT}, "required": ["c"]}]},
            ['{"a": 1, "b": 2, "c": 3}'],
            ['{"a": 1}'],
        ),
        (
            {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": INT, "b": INT}},
            ['{"a": 1}', '{"b": 1}'],
            ["{}"],
        ),
    ],
)
def test_objects_have_the_members_that_are_described(
    derives: Callable[[str, str], bool], schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for given in (schema, json.dumps(schema)):
        grammar = grammar_of(outputs(json=given), FIELD)
        assert [text for text in right if not derives(grammar, text)] == []
        assert [text for text in wrong if derives(grammar, text)] == []


def test_closing_leaves_the_schema_of_the_caller_alone() -> None:
    before = json.dumps(NESTED)
    grammar_of(outputs(json=NESTED), FIELD)
    assert json.dumps(NESTED) == before
    many: dict[str, Any] = {"type": "object", "properties": {}, "description": ""}
    many["description"] = "x" * (MAX_SCHEMA_CHARS - len(json.dumps(many)))
    assert "additionalProperties" in grammar_of(outputs(json=many), FIELD)  # its own size counts


@pytest.mark.parametrize("given", [{"json_schema": {}}, {"json_object": True, "x": 1}, [], "json"])
def test_a_mapping_has_the_attributes_only(given: Any) -> None:
    with pytest.raises(BadRequest, match=r"^structured_outputs"):
        StructuredOutputs.of(given, FIELD)
    assert StructuredOutputs.of({"regex": "a"}, FIELD) == outputs(regex="a")


@pytest.mark.parametrize(
    ("field", "grammar", "message"),
    [
        (
            "guided_json",
            'start: %json {"not": {}}',
            "guided_json: expected what can be compiled, got: Unimplemented",
        ),
        (
            "x.grammar",
            "start: nothing",
            "x.grammar: expected what can be compiled, got: at 1(8): unknown name",
        ),
        ("guided_regex", "start: /(?=a)b/", "look-around"),
        (
            "x.grammar",
            "start: A\nA: " + " & ".join(f"/(.*{c}.*){{30}}/" for c in "abcd"),
            "its patterns together take more",
        ),
        ("guided_json", 'start: %json {"type": "integer", "minimum": 5, "maximum": 4}', "guided_json: expected what"),
    ],
)
def test_what_the_library_refuses_is_refused_in_its_words(
    vocabulary: LLTokenizer, field: str, grammar: str, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        GrammarChecker(vocabulary).verify(grammar, field)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.param == field.split(".", maxsplit=1)[0]


def test_a_right_grammar_passes(vocabulary: LLTokenizer) -> None:
    GrammarChecker(vocabulary).verify(grammar_of(outputs(json=PERSON), FIELD), FIELD)


def test_a_tokenizer_that_cannot_be_used_refuses_all_with_the_reason() -> None:
    class Wrong(Spelled):
        tokens = (b"</s>", None)

    with pytest.raises(BadRequest, match="guided_json: not supported: structured output: expected a tokenizer whose"):
        GrammarChecker.of(cast(Tokenizer, Wrong())).verify("start: ", "guided_json")


def test_errors_are_one_line_of_a_bounded_length() -> None:
    text = "at 1(8): invalid regex:\n    (\n    ^\nerror: unclosed group\n   1 | start: /(/\n              ^\n\n"
    assert library_error(text) == "invalid regex: ( error: unclosed group"
    assert len(library_error("x" * 10_000)) == 500
