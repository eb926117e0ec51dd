"""Bytes -> body: what real clients send is taken, and all that is wrong is said at once, briefly, in JSON's words."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import pytest

from fastdeploy_sd.entrypoints.openai.protocol import (
    Body,
    ChatCompletionBody,
    CompletionBody,
    fields,
    parse_body,
)
from fastdeploy_sd.entrypoints.openai.protocol.faults import MAX_FAULTS
from fastdeploy_sd.entrypoints.openai.protocol.fields import Only
from fastdeploy_sd.errors import MAX_SHOWN_CHARS, BadRequest
from fastdeploy_sd.text.tool_calls.tools import ToolMode

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT: dict[str, Any] = {"prompt": "hello"}
BODIES: list[tuple[type[Body], dict[str, Any]]] = [(ChatCompletionBody, HELLO), (CompletionBody, PROMPT)]
BIG = "x" * 100_000


def parse(body_type: type[Any], value: Any) -> Any:
    return parse_body(body_type, json.dumps(value).encode())


def refusal(body_type: type[Any], value: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(body_type, value)
    return caught.value


# ---- conversations that clients go on with --------------------------------------------------------------------------

# What a client sends back as the assistant's turn.
SECOND_TURNS: dict[str, dict[str, Any]] = {
    "openai model_dump": {"content": "hi", "refusal": None, "role": "assistant", "annotations": None, "audio": None,
                          "function_call": None, "tool_calls": None},
    "openai stream helper": {"content": "hi", "refusal": None, "role": "assistant", "annotations": [], "audio": None,
                             "function_call": None, "tool_calls": None, "parsed": None},
    "openai npm": {"role": "assistant", "content": "hi", "refusal": None, "parsed": None},
    "litellm": {"content": "hi", "role": "assistant", "tool_calls": None, "function_call": None,
                "provider_specific_fields": {"refusal": None}, "annotations": []},
    "reasoning": {"role": "assistant", "content": "hi", "reasoning": "hm", "reasoning_content": "hm", "id": "m1"},
    "an editor's": {"role": "assistant", "content": "hi", "opts": {"visible": True}, "_meta": {"tag": 1}},
}  # fmt: skip


@pytest.mark.parametrize("turn", SECOND_TURNS.values(), ids=SECOND_TURNS)
def test_a_second_turn_carries_what_the_client_knows_of_the_first(turn: dict[str, Any]) -> None:
    body = parse(ChatCompletionBody, {"messages": [*HELLO["messages"], turn, {"role": "user", "content": "more"}]})
    assert [(m.role, m.content) for m in body.messages] == [("user", "hello"), ("assistant", "hi"), ("user", "more")]
    assert body.messages[1].calls == ()


def test_a_history_with_tools_goes_on() -> None:
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "42", "cache_control": {}}], "tool_call_id": "c1"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": ""}},
        {"role": "function", "name": "g", "content": "43"},
    ]
    called, tool, older, function = parse(ChatCompletionBody, {"messages": [*history]}).messages
    assert called.content is None
    expected = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert called.calls == (expected,)
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "42", "c1")
    assert older.calls == ({"type": "function", "function": {"name": "g", "arguments": {}}},)
    assert (function.role, function.name) == ("tool", "g")


def test_names_left_aside_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "_told", set())  # which other tests may have filled
    turn = {"role": "user", "content": "x", "made_up_for_this_test": 1, "null_one": None}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parse(ChatCompletionBody, {"messages": [turn]})
    assert caplog.text.count("made_up_for_this_test") == 1
    assert "null_one" not in caplog.text


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_an_assistant_may_say_nothing(role: str) -> None:
    assert "messages[0].content: expected text" in str(
        refusal(ChatCompletionBody, {"messages": [{"role": role, "content": None}]})
    )


def test_thinking_has_two_names_and_template_variables_count_first() -> None:
    def variables(**fields: Any) -> Any:
        return parse(ChatCompletionBody, HELLO | fields).template_variables()

    assert variables() == {}
    assert variables(enable_thinking=False) == {"enable_thinking": False, "thinking": False}
    assert variables(thinking={"type": "enabled"})["enable_thinking"] is True
    assert variables(reasoning_effort="low", verbosity="high") == {"reasoning_effort": "low", "verbosity": "high"}
    off = {"enable_thinking": False, "thinking": False}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none"} | off
    assert variables(reasoning_effort="none", thinking=True)["enable_thinking"] is True
    assert variables(enable_thinking=False, chat_template_kwargs={"enable_thinking": 1, "deep": {"x": [1]}}) == {
        "enable_thinking": 1, "thinking": False, "deep": {"x": [1]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'{"prompt": "a", "max_tokens": 2, "max_tokens": 3}', "max_tokens"),
        (b'{"prompt": "a: {", "logit_bias": {"1": 1, "1": 1}}', "1"),
        (b'{"prompt": "a", "stop": [{"x": 1.5, "y": [], "\\u0078": 1%s}]}' % (b"0" * 4000), "x"),
    ],
)
def test_a_name_that_is_there_twice_is_refused(content: bytes, name: str) -> None:
    with pytest.raises(BadRequest, match=f"expected every name in an object once, got '{name}' twice") as caught:
        parse_body(CompletionBody, content)
    assert caught.value.param == name


def test_the_same_name_in_two_objects_and_in_texts_is_fine() -> None:
    turn = {"role": "user", "content": '{"a": 1, "a": 2} \\" "a": "'}
    assert len(parse(ChatCompletionBody, {"messages": [turn, turn]}).messages) == 2


# ---- fields that ask for nothing ------------------------------------------------------------------------------------


def neutral_fields(body_type: type[Body]) -> dict[str, Only]:
    kinds = {name: [k for k in field.metadata if isinstance(k, Only)] for name, field in body_type.model_fields.items()}
    return {name: found[0] for name, found in kinds.items() if found}


@pytest.mark.parametrize(("body_type", "least"), BODIES)
def test_neutral_values_are_taken_and_no_others(body_type: type[Body], least: dict[str, Any]) -> None:
    plain = parse(body_type, least)
    fields = neutral_fields(body_type)
    assert len(fields) >= 28
    for name, kind in fields.items():
        for value in (None, *kind.schema["enum"]):
            assert parse(body_type, least | {name: value}) == plain, (name, value)
        for value in (7.5, "other", [1], {"type": "other"}):
            error = refusal(body_type, least | {name: value})
            assert (error.param, error.code) == (name, "not_supported")
            assert error.message.startswith(f"{name}: not supported: ")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": -1, "seed": -1}, None),
        ({"stream_options": {"include_usage": True}}, None),
        ({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}, None),
    ],
)
def test_what_a_client_always_sends_is_taken(fields: dict[str, Any], max_tokens: int | None) -> None:
    params = parse(ChatCompletionBody, HELLO | fields).sampling_params()
    assert (params.max_tokens, params.seed) == (max_tokens, None)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [5]}, "tools[0]: expected a function, got 5"),
        ({"tools": [TOOL, TOOL]}, "tools[1]: expected a name that no other function has, got 'f'"),
        ({"tools": [{"type": "web_search"}]}, "tools: not supported: this server runs no tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools: not supported: this server runs no tools"),
        ({"tools": [{"function": {"name": "f f"}}]}, "tools[0].function.name: expected 1..64 letters"),
        ({"tools": [{"function": {"name": "f" * 65}}]}, "tools[0].function.name: expected 1..64 letters"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict: expected true or false"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters: expected a JSON"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type: expected object, got 'string'",
        ),
        ({"tools": [TOOL] * 129}, "tools: expected a list of at most 128 functions"),
        (
            {"tools": [{"function": {"name": "f", "description": "x" * (1 << 18)}}]},
            "tools: expected at most 262144 characters of JSON in all",
        ),
        ({"tool_choice": "required"}, "tool_choice: expected only with tools, got none"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice: expected the name of one of tools, got 'g'",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice: expected one of none, auto, required, "),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice: not supported: this server runs"),
        ({"tools": [TOOL], "functions": [TOOL["function"]]}, "functions: expected only without tools, got both"),
        ({"function_call": {"name": "f"}}, "function_call: expected only with functions, got none"),
    ],
)
def test_what_is_wrong_about_functions_is_named(fields: dict[str, Any], message: str) -> None:
    assert refusal(ChatCompletionBody, HELLO | fields).message.startswith(message)


@pytest.mark.parametrize(
    ("fields", "mode", "names", "takes_one"),
    [
        ({}, ToolMode.AUTO, "fg", False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ToolMode.AUTO, "fg", True),
        ({"tool_choice": "required", "parallel_tool_calls": True}, ToolMode.REQUIRED, "fg", False),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ToolMode.REQUIRED, "g", True),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]},
                }
            },
            ToolMode.REQUIRED,
            "g",
            False,
        ),
    ],
)
def test_what_may_be_called(fields: dict[str, Any], mode: ToolMode, names: str, takes_one: bool) -> None:
    use = parse(ChatCompletionBody, HELLO | {"tools": [TOOL, {"function": {"name": "g"}}]} | fields).tool_use
    assert (use.mode, use.names, use.takes_one_call) == (mode, {*names}, takes_one)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
def test_where_nothing_may_be_called(fields: dict[str, Any]) -> None:
    assert parse(ChatCompletionBody, HELLO | fields).tool_use is None


# ---- metadata -------------------------------------------------------------------------------------------------------


def test_options_in_metadata_count_where_the_request_is_silent() -> None:
    metadata = {
        "min_tokens": 3,
        "temperature": 0.5,
        "enable_thinking": False,
        "team": "blue",
        "stop": "a tag",
        "x": None,
    }
    body = parse(ChatCompletionBody, HELLO | {"metadata": metadata, "temperature": 0.25, "min_tokens": None})
    assert (body.min_tokens, body.temperature, body.enable_thinking, body.stop) == (3, 0.25, False, None)


def test_an_option_in_metadata_is_checked_and_named_there() -> None:
    error = refusal(CompletionBody, PROMPT | {"metadata": {"min_tokens": "3", "top_p": 2, "raw_request": False}})
    assert "metadata.raw_request: unknown field" in error.message
    assert "metadata.top_p: expected a number in " in error.message
    assert "min_tokens" not in error.message, "a text is a tag"


# ---- what is wrong, all of it, briefly ------------------------------------------------------------------------------


def test_one_report_has_all_faults() -> None:
    wrong = {"temperature": "hot", "temprature": 1, "priority": True, "tools": [1], "messages": [5, 6]}
    message = refusal(ChatCompletionBody, wrong).message
    assert message.split("; ") == [
        "temprature: unknown field (did you mean 'temperature'?)",
        "temperature: expected a number in 0..1000000, got 'hot'",
        "priority: expected an integer in -2147483648..2147483647, got true",
        "messages[0]: expected an object, got 5",
        "tools[0]: expected a function, got 1",
    ]


def test_a_report_is_bounded() -> None:
    wrong = dict.fromkeys(ChatCompletionBody.model_fields, BIG) | {f"unknown{i}{BIG[:100]}": 1 for i in range(1000)}
    message = refusal(ChatCompletionBody, wrong).message
    assert message.endswith(" more")
    assert message.count("; ") == MAX_FAULTS


@pytest.mark.parametrize(("body_type", "least"), BODIES)
def test_no_text_repeats_more_than_a_little_of_what_was_sent(body_type: type[Body], least: dict[str, Any]) -> None:
    values = (BIG, [BIG], {BIG: BIG}, ["", BIG], {"type": BIG}, [{"role": BIG}], 10**4000, -(10**400))
    for name in [*body_type.model_fields, "y" * 300]:
        for error in errors_of(body_type, least, name, values):
            assert "x" * (MAX_SHOWN_CHARS + 1) not in error.message, name
            assert "0" * (MAX_SHOWN_CHARS + 1) not in error.message, name
            assert len(error.message) < 3 * MAX_SHOWN_CHARS
            assert len(error.param or "") <= MAX_SHOWN_CHARS


@pytest.mark.parametrize(("body_type", "least"), BODIES)
def test_texts_speak_json(body_type: type[Body], least: dict[str, Any]) -> None:
    """Every field with values of every kind: no word of pydantic's or Python's, and the field is named."""
    values = (True, 5, -7, 1.5, "text", [None], [[1]], {"a": 1}, {"type": None}, [{"role": "user"}])
    foreign = ("Input should", "valid ", "dictionary", "None", "True", "pattern", "instance")
    for name in body_type.model_fields:
        for error in errors_of(body_type, least, name, values):
            assert error.message.startswith((name, "prompt: expected either", "messages", "best_of"))
            said = error.message.removeprefix(name)
            assert not [word for word in foreign if word in said], error.message


def errors_of(body_type: type[Body], least: dict[str, Any], name: str, values: Iterable[Any]) -> list[BadRequest]:
    """The refusals of those values of a field that are refused."""
    errors = []
    for value in values:
        try:
            parse(body_type, least | {name: value})
        except BadRequest as error:
            errors.append(error)
    return errors


def test_an_empty_name_is_shown() -> None:
    assert refusal(CompletionBody, PROMPT | {"": 1}).message == '"": unknown field'
    stream = PROMPT | {"stream": True, "stream_options": {"": 1}}
    assert refusal(CompletionBody, stream).message == 'stream_options."": unknown field'


@pytest.mark.slow
def test_a_million_wrong_entries_are_one_fault() -> None:
    assert (
        refusal(ChatCompletionBody, {"messages": [1] * 1_000_000}).message == "messages[0]: expected an object, got 1"
    )
    names = {"a" * 9 + str(i): 1 for i in range(100_000)}
    assert refusal(CompletionBody, PROMPT | names).message.count("unknown field") == MAX_FAULTS
    assert refusal(CompletionBody, PROMPT | {"speculation": names}).message.count("unknown field") == 1
    assert (
        refusal(CompletionBody, PROMPT | {"metadata": names}).message
        == "metadata: expected at most 64 entries, got 100000"
    )
