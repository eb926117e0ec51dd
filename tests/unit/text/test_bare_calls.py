"""Calls without the marks of a format, as models write them in Markdown fences or bare; all other text stays text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from fastdeploy_sd.text.answer_parts import AnswerPart, Content, PartsDelta, ToolCallDelta
from fastdeploy_sd.text.tool_calls.formats import FORMATS, ToolOptions
from tests.unit.text.test_tool_calls import ARGUMENTS, FUNCTIONS, NO_CALLS, TWO_CALLS, cut

GET = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
PRETTY = f'{{\n  "name": "get",\n  "arguments": {ARGUMENTS}\n}}'
NOW = '{"name": "now", "parameters": {}}'
TAGGED = f"<tool_call>\n{GET}\n</tool_call>"
# Text -> the functions that it calls.
FORMS = {
    f"```json\n{PRETTY}\n```": ["get"],
    f"\n```json\n{PRETTY}\n```\n\n": ["get"],
    f"```\n{GET}\n```": ["get"],
    f"```json {GET}```": ["get"],
    GET: ["get"],
    f" {PRETTY}\n": ["get"],
    f"[{GET}, {NOW}]": ["get", "now"],
    f"```json\n[\n{PRETTY},\n{NOW}\n]\n```": ["get", "now"],
    f"```json\n{PRETTY}\n{NOW}\n```": ["get", "now"],
    f"```json\n{PRETTY},\n{NOW}\n```": ["get", "now"],
    f"```json\n{PRETTY}\n```\n```json\n{NOW}\n```": ["get", "now"],
    f"{GET}\n\n{NOW}": ["get", "now"],
    f"{GET}; {NOW}": ["get", "now"],
    f"{{{GET}}}": ["get"],
    f"```json\n{{\n{PRETTY}\n}}\n```\n{{{NOW}}}": ["get", "now"],
    f"{GET}": ["get"],
    f'{{"name": "get", "arguments": {ARGUMENTS}, "id": 7}}': ["get"],
}
# With those, where the model's own format is hermes.
TAGGED_FORMS = {
    f"```json\n{TAGGED}\n```\n": ["get"],
    f"```xml\n{TAGGED}\n<tool_call>{NOW}</tool_call>\n```": ["get", "now"],
    f"```json\n{TAGGED}\n```\n```json\n{NOW}\n```": ["get", "now"],
    f"{NOW}\n{TAGGED}": ["now", "get"],
    f"<tool_call>{{{GET}}}</tool_call>": ["get"],
    f"{TAGGED}\n{NOW}": ["get", "now"],
}
TEXTS = (
    f"This is how it is done:\n```json\n{GET}\n```",
    "```python\nprint({})\n```",
    '```json\n{"name": "Ann", "arguments": {}}\n```',
    '```json\n{"users": [{"name": "get", "arguments": {}}]}\n```',
    '{"arguments": {"a": 1}, "name": "get"}',
    '{"answer": 1, "name": "get", "arguments": {}}',
    '{"name": "get", "arguments": "{}"}',
    '{"name": "get", "arguments": [1]}',
    '{"name": "get", "result": 1, "arguments": {}}',
    '[1, {"name": "get", "arguments": {}}]',
    "```json",
    "``",
    "{{}}",
    "[]",
    "```jsonl\n{}\n```",
    "```{json}\n```",
)


def parse(name: str, pieces: Iterable[str], *, is_whole: bool = True) -> list[AnswerPart]:
    parser = ToolOptions(name, FUNCTIONS, reads_bare=True).parser()
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.finish() if is_whole else parts


@pytest.mark.parametrize("name", ["hermes", "json", "llama3_json", "glm45", "deepseek_v3"])
@pytest.mark.parametrize("text", FORMS)
def test_calls_without_marks(name: str, text: str) -> None:
    parts = PartsDelta.of(parse(name, [text]))
    assert [call.name for call in parts.tool_calls] == FORMS[text]
    assert parts.content == ""
    assert all(call.arguments == (ARGUMENTS if call.name == "get" else "{}") for call in parts.tool_calls)
    if name == "json":  # which reads them under its own name
        parser = FORMATS[name].parser(FUNCTIONS)
        assert PartsDelta.of(parser.push(text) + parser.finish()) == parts


@pytest.mark.parametrize("text", TAGGED_FORMS)
def test_calls_with_marks_in_fences_and_with_doubled_braces(text: str) -> None:
    parts = PartsDelta.of(parse("hermes", [text]))
    assert [call.name for call in parts.tool_calls] == TAGGED_FORMS[text]
    assert parts.content == ""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", [*TEXTS, *NO_CALLS])
def test_other_text_stays_text(name: str, text: str) -> None:
    assert PartsDelta.of(parse(name, [text])) == PartsDelta(content=text)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_the_own_format_are_read_as_before(name: str) -> None:
    for before in ("", "I look.\n", "```python\nx\n```\n", "[1]\n"):
        parts = PartsDelta.of(parse(name, [before + TWO_CALLS[name]]))
        if before and FORMATS[name].only_first:
            assert parts.content == before + TWO_CALLS[name]
        else:
            assert [(call.name, json.loads(call.arguments)) for call in parts.tool_calls] == [
                ("get", json.loads(ARGUMENTS)),
                ("now", {}),
            ]
            assert parts.content == before.rstrip()


def test_text_after_a_call_is_content() -> None:
    parts = parse("hermes", [f"```json\n{GET}\n```\n\nThis gets the weather."])
    assert isinstance(parts[0], ToolCallDelta)
    assert PartsDelta.of(parts).content == "\n\nThis gets the weather."


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```py", "```py"),
        ("```json\nx", "```json\nx"),
        ('```json\n{"user": "A', '```json\n{"user": "A'),
        ('{"users": [', '{"users": ['),
        ('{"name": "A', '{"name": "A'),
        ('{"name": "get", "age": 3', '{"name": "get", "age": 3'),
        ("[1", "[1"),
    ],
)
def test_text_is_held_back_only_while_it_may_be_a_call(text: str, told: str) -> None:
    parts = parse("hermes", [text], is_whole=False)
    content = PartsDelta.of(parts).content
    assert told.startswith(content)
    assert len(content) >= len(told) - 1
    assert parse("hermes", ['```json\n{\n  "name": "g'], is_whole=False) == []


def test_arguments_in_a_fence_are_told_as_they_come() -> None:
    parts = parse("hermes", ['```json\n{"name": "get", "arguments": {"city": "Ro'], is_whole=False)
    assert parts == [ToolCallDelta(0, "get", '{"city": "Ro')]
    assert Content("```") not in parts


def test_a_repeated_call_ends_the_answer_here_too() -> None:
    for text in (
        f"```json\n{GET}\n{PRETTY}\n{NOW}\n```",
        f"[{GET}, {GET}, {NOW}]",
        f"{TAGGED}\n```json\n{GET}\n```\n{NOW}",
    ):
        parts = PartsDelta.of(parse("hermes", [text]))
        assert ([call.name for call in parts.tool_calls], parts.content) == (["get"], "")


@pytest.mark.parametrize("name", FORMATS)
def test_cuts_do_not_matter(name: str) -> None:
    rng = random.Random(name)
    samples = [*FORMS, *TAGGED_FORMS, *TEXTS, TWO_CALLS[name]]
    scraps = [
        *FORMATS[name].openings,
        "```",
        "```json\n",
        "{",
        "[",
        "]",
        "}",
        ",",
        '"name"',
        '"get"',
        ": ",
        "\n",
        " ",
        GET,
    ]
    for _ in range(150):
        pieces = [rng.choice(samples) if rng.random() < 0.4 else rng.choice(scraps) for _ in range(rng.randrange(1, 6))]
        text = "".join(pieces)
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        text = text if rng.random() < 0.6 else text[start:end]
        for is_whole in (True, False):
            expected = PartsDelta.of(parse(name, [text], is_whole=is_whole))
            assert PartsDelta.of(parse(name, cut(text, rng), is_whole=is_whole)) == expected, text
            assert PartsDelta.of(parse(name, text, is_whole=is_whole)) == expected, text
        if not expected.tool_calls:
            assert PartsDelta.of(parse(name, [text])).content == text
