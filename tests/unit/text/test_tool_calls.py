"""Calls are found in every format, whatever the cuts; what is no call is content, to the last character."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.answer_parts import AnswerPart, Content, PartsDelta, ToolCallDelta
from fastdeploy_sd.text.tool_calls.call_format import CallableFunction
from fastdeploy_sd.text.tool_calls.formats import ALIASES, FORMATS, GENERIC, find_format
from fastdeploy_sd.text.tool_calls.json_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_LAST,
    DEEPSEEK_OPENING,
    DEEPSEEK_SEPARATOR,
)
from fastdeploy_sd.text.tool_calls.json_scan import JsonScan, Malformed
from fastdeploy_sd.text.tool_calls.scanner import Scanner

FUNCTIONS = (CallableFunction("get", ("city", "note")), CallableFunction("now"))
ARGUMENTS = '{"city": "Z\\u00fcrich \\"x\\"", "n": [1, -2.5e3, {"a": null}], "ok": true}'
_V3 = f"{DEEPSEEK_BEGIN}function{DEEPSEEK_SEPARATOR}"

# Format -> a text with the calls get(ARGUMENTS) and now() and what they come to if not that.
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get", "arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n'
    '{"arguments": {}, "name": "now"}\n</tool_call>',
    "llama3_json": f'{{"name": "get", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    "json": f'[{{"name": "get", "arguments": {ARGUMENTS}}}, {{"name": "now"}}]',
    "mistral": f'[TOOL_CALLS] [{{"name": "get", "arguments": {ARGUMENTS}, "id": "x"}}, {{"name": "now", "id": "y"}}]',
    "deepseek_v3": f"{DEEPSEEK_OPENING}{_V3}get\n```json\n{ARGUMENTS}\n```{DEEPSEEK_END}\n"
    f"{_V3}now\n```json\n{{}}\n```{DEEPSEEK_END}{DEEPSEEK_LAST}",
    "deepseek_v31": f"{DEEPSEEK_OPENING}{DEEPSEEK_BEGIN}get{DEEPSEEK_SEPARATOR}{ARGUMENTS}{DEEPSEEK_END}"
    f"{DEEPSEEK_BEGIN}now{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_END}{DEEPSEEK_LAST}",
    "glm45": '<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Z\u00fcrich "x"</arg_value>\n<arg_key>n</arg_key>\n'
    '<arg_value>[1, -2.5e3, {"a": null}]</arg_value>\n<arg_key>ok</arg_key>\n<arg_value>true</arg_value>\n</tool_call>'
    "\n<tool_call>now\n</tool_call>",
    "qwen3_coder": '<tool_call>\n<function=get>\n<parameter=city>\nZ\u00fcrich "x"\n</parameter>\n<parameter=n>\n'
    '[1, -2.5e3, {"a": null}]\n</parameter>\n<parameter=ok>\ntrue\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
}
TWO_CALLS["harmony"] = (
    f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)
_EXPECTED: tuple[tuple[str, object], ...] = ("get", json.loads(ARGUMENTS)), ("now", {})


def parse(name: str, pieces: Iterable[str], *, is_whole: bool = True) -> list[AnswerPart]:
    parser = FORMATS[name].parser(FUNCTIONS)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.finish() if is_whole else parts


def parts_of(name: str, text: str) -> PartsDelta:
    return PartsDelta.of(parse(name, [text]))


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name: str) -> None:
    parts = parts_of(name, TWO_CALLS[name])
    assert [(call.name, json.loads(call.arguments)) for call in parts.tool_calls] == [*_EXPECTED]
    assert parts.content == ""
    if FORMATS[name].text.parameters is None:
        assert parts.tool_calls[0].arguments == ARGUMENTS  # byte for byte


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_told_as_they_come(name: str) -> None:
    deltas = [p for p in parse(name, TWO_CALLS[name]) if isinstance(p, ToolCallDelta) and p.index == 0]
    assert deltas[0].name == "get"
    assert all(delta.name is None for delta in deltas[1:])
    assert len(deltas) > 15


@pytest.mark.parametrize("name", FORMATS)
def test_content_stands_before_and_behind_calls(name: str) -> None:
    text = "I look.\n\n" + TWO_CALLS[name] + "\nDone. "
    parts = parse(name, [text])
    if FORMATS[name].only_first:
        assert PartsDelta.of(parts) == PartsDelta(content=text)
        return
    assert parts[0] == Content("I look.")
    assert PartsDelta.of(parts).content == "I look.\nDone. "
    assert len(PartsDelta.of(parts).tool_calls) == 2
    assert PartsDelta.of(parse(name, [" \n" + TWO_CALLS[name] + "\n"])).content == ""


NO_CALLS = (
    "",
    " \n",
    "Hello, world. \n",
    "a < b, <tool_cal, <tool_call> of nothing",
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    '<tool_call>{"name": "get", "arguments": []}</tool_call>',
    '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": 7}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"arguments": {"a": 01}, "name": "get"}</tool_call>',
    "<tool_call>unknown\n</tool_call>",
    "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
    f"{DEEPSEEK_OPENING}{DEEPSEEK_BEGIN}unknown{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_END}{DEEPSEEK_LAST}",
    "[TOOL_CALLS] [1]",
    "[TOOL_CALLS]unknown[ARGS]{}",
    "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>final<|message|>to=functions.get",
    "to=functions.get it",
    '{"name": "unknown", "parameters": {}}',
    '{"answer": 42}',
    "{",
    "[1, 2]",
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert parts_of(name, text) == PartsDelta(content=text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_answer_of_false_openings_takes_time_in_proportion(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    find = Scanner._find

    def measured(scanner: Scanner, text: str) -> tuple[int, str] | None:
        lengths.append(len(text))
        return find(scanner, text)

    monkeypatch.setattr(Scanner, "_find", measured)
    text = (FORMATS[name].openings[0] + "!") * 1000
    assert parts_of(name, text) == PartsDelta(content=text)
    assert max(lengths) < 2000


@pytest.mark.parametrize("name", FORMATS)
def test_every_beginning_of_a_call_is_content_or_a_call(name: str) -> None:
    """A limit may end the text anywhere: before the arguments it is content, from there on an unfinished call."""
    text = TWO_CALLS[name]
    whole = parts_of(name, text).tool_calls
    for end in range(len(text)):
        parts = parts_of(name, text[:end])
        if not parts.tool_calls:
            assert parts.content == text[:end]
        for call, full in zip(parts.tool_calls, whole, strict=False):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments.removesuffix("}"))


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        (
            "hermes",
            '<tool_call>{"name": "get", "arguments": {"n": oops}}</tool_call>',
            ['{"n": '],
            "oops}}</tool_call>",
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} and more', ["{}"], "} and more"),
        ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', ["{}"], "<tool_call>"),
        ("hermes", '<tool_call>{"name": "now"}\n<tool_call>{"name": "get"}</tool_call>', ["{}", "{}"], "\n"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', ["{}"], ""),
        ("qwen3_coder", "<function=now>\n</function>", ["{}"], ""),
        ("qwen3_coder", "<function=get><parameter=n>007</parameter></function>", ['{"n":"007"}'], ""),
        (
            "qwen3_coder",
            "<function=get><parameter=city>\n\n1</x\n\n</parameter></function>",
            ['{"city":"\\n1</x\\n"}'],
            "",
        ),
        (
            "glm45",
            "<tool_call>get<arg_key>city</arg_key><arg_value>\n7\n</arg_value></tool_call>",
            ['{"city":"\\n7\\n"}'],
            "",
        ),
        ("glm45", "<tool_call>get<arg_key>n</arg_key><arg_value>NaN</arg_value></tool_call>", ['{"n":"NaN"}'], ""),
        ("mistral", '[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]now{}', ['{"n": 1}', "{}"], ""),
        ("mistral", '[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{"n": 1}', ['{"n": 1}'], ""),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', ["{}"], ""),
        ("json", '{"name": "now", "parameters": {}}\nDone', ["{}"], "\nDone"),
        ("harmony", '<|channel|>commentary to=functions.get<|message|>{"n": 1}', ['{"n": 1}'], ""),
        ("harmony", " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|end|>", ["{}"], ""),
        ("harmony", "<|start|>assistant<|channel|>commentary json to=get code<|message|> {} <|call|>", ["{}"], ""),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", ["{}"], ""),
        ("harmony", "<|channel|><|channel|>commentary to=functions.now<|message|>{}<|call|>", ["{}"], ""),
        ("harmony", "<|channel|>analysis to=functions.get code<|message|>{oops<|call|>", ["{"], "oops<|call|>"),
    ],
)
def test_what_models_write_otherwise(name: str, text: str, calls: list[str], content: str) -> None:
    parts = parts_of(name, text)
    assert [call.arguments for call in parts.tool_calls] == calls
    assert parts.content == content


@pytest.mark.parametrize("name", FORMATS)
def test_cuts_do_not_matter(name: str) -> None:
    """Texts of everything that means something in a format, in any order; each is cut in several ways."""
    rng = random.Random(name)
    samples = [TWO_CALLS[name], *NO_CALLS]
    scraps = [
        *FORMATS[name].openings,
        *FORMATS[name].markers,
        "get",
        "now",
        '"name"',
        ": ",
        '{"n": 1}',
        "}",
        "\n",
        " ",
        "<",
    ]
    for _ in range(400):
        parts = [rng.choice(samples) if rng.random() < 0.3 else rng.choice(scraps) for _ in range(rng.randrange(1, 8))]
        text = "".join(parts)
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        text = text if rng.random() < 0.7 else text[start:end]
        pieces = cut(text, rng)
        for is_whole in (True, False):
            expected = PartsDelta.of(parse(name, [text], is_whole=is_whole))
            assert PartsDelta.of(parse(name, pieces, is_whole=is_whole)) == expected, (text, pieces)
            assert PartsDelta.of(parse(name, text, is_whole=is_whole)) == expected, text
        if not expected.tool_calls:
            assert PartsDelta.of(parse(name, [text])).content == text


def test_json_is_checked_as_json_is() -> None:
    """What the scan takes is what the standard library takes, on texts near valid ones."""
    rng = random.Random(0)
    samples = [ARGUMENTS, '{"a": {"b": [[], {}, "\\\\", "\\u0041", 0, -0.0, 1e9, false]}}', "[1, [2], {}]", "{ }"]
    num_valid = 0
    for _ in range(4000):
        text = list(rng.choice(samples))
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(2)] = rng.choice(' {}[]",:01-.eE\\utn\n')
        assert _is_json("".join(text)) == _is_taken("".join(text)), "".join(text)
        num_valid += _is_json("".join(text))
    assert 1000 < num_valid < 3000


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list) and text[-1:] in ("}", "]") and text.lstrip()[:1] in ("{", "[")
    except ValueError:
        return False


def _is_taken(text: str) -> bool:
    scan = JsonScan()
    try:
        ends = [scan.push(char) for char in text]
    except Malformed:
        return False
    return any(ends[-1:]) and not any(ends[:-1])


def test_the_format_follows_from_the_chat_template_or_the_option() -> None:
    assert find_format("auto", None) == find_format("auto", "{{ messages }}") == GENERIC
    assert find_format(None, "<tool_call>") is None
    for name, form in FORMATS.items():
        assert find_format(name, None) == name
        for group in form.signs:
            assert find_format("auto", "x".join(group)) == name
    assert ALIASES.keys().isdisjoint(FORMATS)
    assert all(find_format(name, None) == found for name, found in ALIASES.items())
    assert find_format("ernie-x1", None) == "hermes"
    with pytest.raises(ConfigError, match=r"tool_call_parser: expected one of auto, none, .*did you mean 'hermes'"):
        find_format("herms", None)


def test_a_long_text_takes_linear_time() -> None:
    """Openings that come to nothing are not read again and again; quadratic work would take minutes."""
    text = '<tool_call>{"arguments": {"a": "' * 4000
    assert parts_of("hermes", text).content == text
    assert PartsDelta.of(parse("hermes", "<" * 20_000)).content == "<" * 20_000
    assert PartsDelta.of(parse("hermes", " " * 20_000 + "x")).content == " " * 20_000 + "x"
