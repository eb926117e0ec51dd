"""Guided calls always parse: what a grammar allows, drawn at random, is read as calls whose arguments are valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.answer_parts import PartsDelta
from fastdeploy_sd.text.tool_calls.formats import FORMATS, ToolOptions
from fastdeploy_sd.text.tool_calls.grammars import MAX_GUIDED_CALLS, ends_after_calls, is_guided, tool_grammar
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolMode, ToolUse

BYTES = LLTokenizer("byte")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["x", "y/z", '"<a>']},
        "tag": {"type": "string", "pattern": "^[a-c/]{2,4}$"},
        "note": {"anyOf": [{"enum": ["n"]}, {"type": "null"}]},
        "points": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/point"}},
    },
    "required": ["city", "unit"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}
GET, NOW = Tool("get", "Gets.", SCHEMA, strict=True), Tool("now")
BOTH = ToolUse((GET, NOW), ToolMode.REQUIRED, frozenset({"get", "now"}))
NAMED = ToolUse((GET, NOW), ToolMode.REQUIRED, frozenset({"get"}), is_named=True)
FREE = ToolUse((GET, NOW), ToolMode.AUTO, frozenset({"get", "now"}))
ONE = ToolUse((GET, NOW), ToolMode.AUTO, frozenset({"get", "now"}), is_parallel=False)


def grammar(name: str, use: ToolUse, *, reads_bare: bool = False) -> str:
    text = tool_grammar(FORMATS[name], use, {}, reads_bare=reads_bare)
    assert not LLMatcher.validate_grammar(text, BYTES)
    return text


def drawn(text: str, rng: random.Random) -> str:
    """A text that a grammar allows, byte by byte."""
    matcher, mask = LLMatcher(BYTES, text), allocate_token_bitmask(1, BYTES.vocab_size)
    output = bytearray()
    while True:
        fill_next_token_bitmask(matcher, mask)
        bits = mask[0].view("uint32")
        allowed = [i for i in range(BYTES.vocab_size) if bits[i // 32] >> (i % 32) & 1]
        ascii_ids = [i for i in allowed if 32 <= i < 127] or allowed
        token = BYTES.eos_token if BYTES.eos_token in allowed and rng.random() < 0.5 else rng.choice(ascii_ids)
        matcher.consume_token(token)
        assert not matcher.get_error()
        if token == BYTES.eos_token:
            return output.decode()
        output.append(token)


def parts_of(name: str, use: ToolUse, text: str) -> PartsDelta:
    form = FORMATS[name]
    functions = [tool.as_callable() for tool in use.callable_tools]
    parser = form.parser(functions, ends_after_calls=ends_after_calls(form, use))
    return PartsDelta.of(parser.push(text) + parser.finish())


def accepts(text: str, output: str) -> bool:
    matcher = LLMatcher(BYTES, text)
    tokens = BYTES.tokenize_str(output)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.slow
@pytest.mark.parametrize("use", [BOTH, NAMED], ids=["required", "named"])
@pytest.mark.parametrize("name", FORMATS)
def test_wanted_calls_always_parse(name: str, use: ToolUse) -> None:
    rng = random.Random(name)
    text = grammar(name, use)
    num_get = 0
    for _ in range(12):
        parts = parts_of(name, use, drawn(text, rng))
        assert parts.content == ""
        assert 1 <= len(parts.tool_calls) <= (1 if use.is_named else MAX_GUIDED_CALLS)
        for call in parts.tool_calls:
            arguments = json.loads(call.arguments)
            num_get += call.name == "get"
            jsonschema.validate(arguments, SCHEMA if call.name == "get" else {"maxProperties": 0})
            assert arguments.keys() <= SCHEMA["properties"].keys()
    assert num_get


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_may_be_made_is_guided_from_its_opening_on(name: str) -> None:
    """Text is free; an opening is followed by a call, of which a strict one follows its schema and another is JSON."""
    form = FORMATS[name]
    begin = form.text.before_all + form.text.before_name
    good = {tool: drawn(grammar(name, use), random.Random(0)) for tool, use in (("get", NAMED),)}["get"]
    texts = ["", "Hello < world.\n", good]
    if not form.only_first:
        texts += ["I look.\n" + good]
    for use in (FREE, ONE):
        text = grammar(name, use)
        for output in texts:
            assert accepts(text, output), output
        assert accepts(text, begin + "unknown") == (name == "json")  # which is text there
        assert form.only_first or not accepts(text, "x" + begin + "get")
    more = good + "\nDone." if not form.only_first else good
    assert accepts(grammar(name, ONE), more) == form.only_first
    assert accepts(grammar(name, FREE), more)


BARE = '{"name": "get", "arguments": {"city": "a", "unit": "x"}}'
BARE_NOW = '{{ "name": "now", "parameters": {}}\n}'


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.text.parameters is None])
def test_a_call_without_marks_is_guided_too(name: str) -> None:
    """From its name on, where the answer begins with it; other JSON and code stay free."""
    use_of = {id(use): grammar(name, use, reads_bare=True) for use in (FREE, ONE)}
    options = ToolOptions(name, tuple(tool.as_callable() for tool in FREE.callable_tools), reads_bare=True)
    one = [BARE, f"```json\n{BARE}\n```\n", f"\n```\n[{BARE}]\n```", BARE_NOW, f"[{BARE}]"]
    several = [
        f"```json\n{BARE},\n{BARE_NOW}\n```",
        f"```json\n{BARE}\n```\n\n```json\n{BARE_NOW}```",
        f"[{BARE}, {BARE_NOW}]",
    ]
    texts = [
        "",
        "{",
        "```json\n[1, 2]\n```",
        "```python\nx\n```",
        '{"name": "unknown", "arguments": 1}',
        f"Look: {BARE}",
    ]
    wrong = ['{"city": "a"}', '{"city": "a", "unit": "z"', '{"city": "a", "unit": "x", "other"']
    for output in (*one, *several):
        parser = options.parser()
        calls = PartsDelta.of(parser.push(output) + parser.finish()).tool_calls
        assert len(calls) == 1 + (output in several) or (name == "mistral" and "[" in output), output
    for use in (FREE, ONE):
        text = use_of[id(use)]
        assert all(accepts(text, output) for output in (*one, *texts))
        assert [accepts(text, output) for output in several] == [use is FREE] * len(several)
        for arguments in wrong:
            beginning = '```json\n{"name": "get", "arguments": ' + arguments
            assert not allows(text, beginning), arguments
        assert allows(text, '```json\n{"name": "now", "arguments": {"any": ')


def test_calls_without_marks_make_a_grammar_little_longer() -> None:
    """A request's many functions must still fit."""
    tools = tuple(Tool(f"function_{i}", None, SCHEMA, strict=True) for i in range(128))
    use = ToolUse(tools, ToolMode.AUTO, frozenset(tool.name for tool in tools))
    assert len(grammar("hermes", use, reads_bare=True)) < 1.3 * len(grammar("hermes", use))


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.has_separate_calls])
def test_a_model_is_free_after_a_wanted_call(name: str) -> None:
    """It may begin another call, which is guided; anything else ends the answer and is no content."""
    call = drawn(grammar(name, NAMED), random.Random(0))
    text = grammar(name, BOTH)
    for other in ("\n", "\n```", " That was it. <", "</tool_call>"):
        assert accepts(text, call + other)
        assert not accepts(grammar(name, NAMED), call + other)
        assert parts_of(name, BOTH, call + other + call) == parts_of(name, BOTH, call)
    assert accepts(text, f"{call}\n{call}")
    assert not allows(text, f"{call}\n{FORMATS[name].text.before_name}unknown")
    assert not allows(text, "x")


def allows(text: str, output: str) -> bool:
    """Whether an answer may begin like this."""
    tokens = BYTES.tokenize_str(output)
    return LLMatcher(BYTES, text).try_consume_tokens(tokens) == len(tokens)


def test_what_is_free_has_no_grammar() -> None:
    lax = ToolUse((NOW,), ToolMode.AUTO, frozenset({"now"}))
    assert not is_guided(lax)
    assert all(map(is_guided, (BOTH, NAMED, FREE, ONE)))


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_with_a_grammar_of_its_own_is_that_or_calls(name: str) -> None:
    text = tool_grammar(FORMATS[name], FREE, {}, 'start: "a" b\nb: "b" | /c+/')
    call = drawn(grammar(name, NAMED), random.Random(0))
    assert [accepts(text, output) for output in ("ab", "accc", call, "", "a", "x", "x" + call)] == [True] * 3 + [
        False
    ] * 4


def test_hidden_tokens_are_tokens() -> None:
    """And a text of the user that reads like one is text."""
    ids = {"[TOOL_CALLS]": 300}
    tool = Tool("f", None, {"properties": {"a": {"enum": ["[TOOL_CALLS]"]}}})
    use = ToolUse((tool,), ToolMode.REQUIRED, frozenset({"f"}))
    text = tool_grammar(FORMATS["mistral"], use, ids)
    assert text.count("<[300]>") == 1
    assert text.startswith("start: <[300]>")


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"anyOf": [{"properties": {"a": {}}}]}, "parameters that are all in properties, got anyOf"),
        ({"properties": {"a>": {}}}, "names of parameters"),
        ({"properties": {"a": {"enum": ["</arg_value>"]}}}, "values of a without </arg_value>, got one with it"),
    ],
)
def test_what_a_format_cannot_write_is_refused(parameters: dict[str, Any], what: str) -> None:
    use = ToolUse((Tool("f", None, parameters),), ToolMode.REQUIRED, frozenset({"f"}))
    assert tool_grammar(FORMATS["hermes"], use, {})
    with pytest.raises(BadRequest, match=rf"tools: f: expected, to guide its calls in this model's format, {what}"):
        tool_grammar(FORMATS["glm45"], use, {})


def test_a_pattern_cannot_leave_its_place() -> None:
    for pattern in ("/", r"\/", "a/\nstart: x", "\\", ")/"):
        tool = Tool("f", None, {"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]})
        text = tool_grammar(FORMATS["glm45"], ToolUse((tool,), ToolMode.REQUIRED, frozenset({"f"})), {})
        assert text.count("start:") == 1 + pattern.count("start:")
        assert all(line.split(":")[0] not in ("start", " x") for line in text.splitlines()[1:])
