"""A call that equals an earlier one of its answer ends the answer and is never told, in every format."""

from __future__ import annotations

import json
import random

import pytest

from fastdeploy_sd.text.answer_parts import AnswerPart, PartsDelta, ToolCallDelta
from fastdeploy_sd.text.tool_calls.call_format import CallableFunction
from fastdeploy_sd.text.tool_calls.formats import FORMATS
from tests.unit.text.test_tool_calls import FUNCTIONS, cut, parse

FIRST = '{"a": 1, "b": [true, "x"], "c": {"d": null}}'


def call(arguments: str, name: str = "get") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


def told(text: str) -> tuple[list[str], str]:
    parts = PartsDelta.of(parse("hermes", [text]))
    return [call.arguments for call in parts.tool_calls], parts.content


@pytest.mark.parametrize(
    "other",
    [
        FIRST,
        '{"c":{"d":null},\n"b":[true,"\\u0078"],"a":1.0}',
        '{"a": 10e-1, "c": {"d": null}, "b": [true, "x"]}',
    ],
)
def test_equal_calls_are_those_of_equal_json(other: str) -> None:
    assert told(call(FIRST) + "Again.\n" + call(other) + "More" + call("{}")) == ([FIRST], "\nAgain.")


@pytest.mark.parametrize(
    "other",
    [
        '{"a": true, "b": [true, "x"], "c": {"d": null}}',
        '{"a": 1, "b": [1, "x"], "c": {"d": null}}',
        '{"a": 1, "b": [true, "x"]}',
        '{"a": 1, "b": [true, "x"], "c": {"d": null}, "e": null}',
        '{"a": 1.0000000000000000000000001, "b": [true, "x"], "c": {"d": null}}',
        '{"a": 1e99999999999999999999, "b": [true, "x"], "c": {"d": null}}',
        "{}",
    ],
)
def test_other_calls_are_told(other: str) -> None:
    assert told(call(FIRST) + call(other)) == ([FIRST, other], "")
    assert told(call(FIRST) + call(FIRST, "now")) == ([FIRST, FIRST], "")
    assert told(call(other) + call(FIRST) + call(other) + call("{}")) == ([other, FIRST], "")


def test_a_call_is_held_back_only_as_long_as_it_may_repeat_one() -> None:
    """From its first complete member on that no earlier call has, a call is told as it comes."""
    text = call('{"path": "a", "text": "x"}') + call('{"path": "b", "text": "yyyy"}')
    begin = text.index("yyyy")
    parts = parse("hermes", [text[: begin + 2]], is_whole=False)
    assert [p.arguments for p in parts if isinstance(p, ToolCallDelta)][-1] == '{"path": "b", "text": "yy'
    held = parse("hermes", [call(FIRST) + call(FIRST)[:-20]], is_whole=False)
    assert [p.index for p in held if isinstance(p, ToolCallDelta)] == [0]


def test_an_incomplete_call_is_no_repeat() -> None:
    """Where a limit ends the answer, or the model writes no JSON, clients get what there is."""
    assert told(call(FIRST) + call(FIRST)[:60]) == ([FIRST, FIRST[:19]], "")
    assert told(call(FIRST) + call('{"a": 1, oops}')) == ([FIRST, '{"a": 1, '], "oops}}\n</tool_call>\n")


def test_arguments_as_deep_as_python_cannot_read_are_told() -> None:
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    assert told(call(deep) + call(deep)) == ([deep, deep], "")


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_tells_a_repeated_call_whatever_the_cuts(name: str) -> None:
    form, rng = FORMATS[name], random.Random(name)
    written = form.text
    texts = [_written(name, value) for value in ("x", "yy", "x", "z")]
    text = written.before_all + written.between.join(texts) + written.after_all
    expected = PartsDelta.of(parse(name, [text]))
    assert [json.loads(call.arguments) for call in expected.tool_calls] == [{"city": "x"}, {"city": "yy"}]
    assert expected.content == ""
    for _ in range(100):
        parser, parts = form.parser(FUNCTIONS), list[AnswerPart]()
        for piece in cut(text, rng):
            parts += parser.push(piece)
        assert parser.is_over
        assert parser.finish() == []
        assert PartsDelta.of(parts) == expected


def _written(name: str, value: str) -> str:
    text = FORMATS[name].text
    parameters = text.parameters
    if parameters is None:
        arguments = json.dumps({"city": value})
    else:
        arguments = parameters.before_name + "city" + parameters.before_value + value + parameters.after
    return text.before_name + "get" + text.before_arguments + arguments + text.after


def test_many_calls_take_time_in_proportion() -> None:
    """Each call is compared with the earlier ones, but none is read again."""
    function = CallableFunction("get")
    parser = FORMATS["hermes"].parser([function])
    parts = PartsDelta.of(parser.push("".join(call(f'{{"n": {i}}}') for i in range(1500))) + parser.finish())
    assert len(parts.tool_calls) == 1500
