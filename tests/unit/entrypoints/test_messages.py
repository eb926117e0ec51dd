"""/v1/messages over an engine that plays given texts: Anthropic's blocks, events, errors and words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastdeploy_sd.entrypoints.openai.protocol import CountTokensBody, MessagesBody, parse_body
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.chat_template import Message, PromptEnd
from fastdeploy_sd.types import FinishReason
from tests.unit.entrypoints.scripted_app import Script, ScriptedApp
from tests.unit.entrypoints.test_tool_answers import ARGUMENTS, CALL, OTHER_ARGUMENTS, PARAMETERS, TEXT, script

PATH = "/v1/messages"
TOOL = {"name": "get", "description": "Gets.", "input_schema": PARAMETERS}
ASK: dict[str, Any] = {"max_tokens": 300, "messages": [{"role": "user", "content": "hello"}], "request_id": "msg_1"}
APP = ScriptedApp(tool_call_parser="hermes", reasoning_parser="qwen3")
THOUGHT = "<think>\nOne, two.\n</think>\n\n"


def answer(text: str, reason: FinishReason = FinishReason.STOP, **ask: Any) -> dict[str, Any]:
    response = APP.post(PATH, ASK | ask, [script(text, 3, reason)])
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == "msg_1"
    return dict(response.json())


def events(text: str, step: int, reason: FinishReason = FinishReason.STOP, **ask: Any) -> list[dict[str, Any]]:
    response = APP.post(PATH, ASK | {"stream": True} | ask, [script(text, step, reason)])
    parts = [part.split("\n") for part in response.text.removesuffix("\n\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in found]
    return found


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, as Anthropic's package adds it up."""
    first, *others, end, stop = found
    assert (first["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    inputs: dict[int, str] = {}
    for event in others:
        blocks, index = message["content"], event["index"]
        if event["type"] == "content_block_start":
            assert index == len(blocks)
            blocks.append(event["content_block"])
            continue
        assert index == len(blocks) - 1
        if event["type"] == "content_block_delta":
            match event["delta"]:
                case {"type": "text_delta", "text": more}:
                    blocks[-1]["text"] += more
                case {"type": "thinking_delta", "thinking": more}:
                    blocks[-1]["thinking"] += more
                case {"type": "input_json_delta", "partial_json": more}:
                    inputs[index] = inputs.get(index, "") + more
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert [e["type"] for e in others].count("content_block_stop") == len(message["content"])
    return dict(message | end["delta"] | {"usage": end["usage"]})


def test_a_text_is_a_message() -> None:
    told = answer("Hi there.", model="m", system="Be brief.", temperature=0)
    assert told["content"] == [{"type": "text", "text": "Hi there."}]
    assert (told["type"], told["role"], told["model"], told["id"]) == ("message", "assistant", "m", "msg_1")
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)
    usage = told["usage"]
    assert usage["output_tokens"] > 3
    assert usage["input_tokens"] == len(APP.client.submitted[0].prompt_token_ids)
    count = {name: value for name, value in ASK.items() if name == "messages"} | {"system": "Be brief."}
    assert APP.post(f"{PATH}/count_tokens", count).json() == {"input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", ["Hi.", TEXT, THOUGHT + "Said.", THOUGHT + CALL, CALL, ""])
def test_a_stream_adds_up_to_the_whole(text: str, step: int) -> None:
    tools: dict[str, Any] = {"tools": [TOOL]}
    whole = answer(text, **tools)
    assert summed(events(text, step, **tools)) == whole


def test_thoughts_texts_and_calls_are_blocks() -> None:
    told = answer(THOUGHT + TEXT, tools=[TOOL])
    thinking, text, first, second = told["content"]
    assert thinking == {"type": "thinking", "thinking": "One, two.", "signature": ""}
    assert (text["type"], text["text"].strip()) == ("text", "I look.")
    assert [(c["type"], c["name"], c["input"]) for c in (first, second)] == [
        ("tool_use", "get", json.loads(ARGUMENTS)), ("tool_use", "get", json.loads(OTHER_ARGUMENTS))
    ]  # fmt: skip
    assert first["id"] != second["id"]
    assert told["stop_reason"] == "tool_use"


def test_how_an_answer_ends() -> None:
    assert answer("One two three", FinishReason.LENGTH)["stop_reason"] == "max_tokens"
    told = answer("One two three", stop_sequences=["two", "x"])
    assert (told["content"], told["stop_reason"], told["stop_sequence"]) == (
        [{"type": "text", "text": "One "}], "stop_sequence", "two"
    )  # fmt: skip
    cut = answer(CALL[: CALL.index("Rome") + 2], FinishReason.LENGTH, tools=[TOOL])
    assert [block["type"] for block in cut["content"]] == ["text"], "no input is made up for a call that was cut"
    assert cut["content"][0]["text"].endswith('{"city": "Ro')


def test_turns_are_read() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "get", "input": {"city": "Rome"}}
    body = parse_body(
        MessagesBody,
        json.dumps(ASK | {
            "system": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "well"}, call]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "none", "is_error": True},
                    {"type": "text", "text": "and?"}]},
                {"role": "assistant", "content": "It"},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "tools": [TOOL | {"cache_control": {"type": "ephemeral"}}],
        }).encode(),
    )  # fmt: skip
    function = {"name": "get", "arguments": '{"city": "Rome"}'}
    made: dict[str, Any] = {"id": "t1", "type": "function", "function": function}
    assert body.turns == [
        Message("system", "a\nb"),
        Message("user", "q"),
        Message("assistant", "well", tool_calls=(made,), reasoning_content="hm"),
        Message("tool", "Error: none", tool_call_id="t1"),
        Message("user", "and?"),
        Message("assistant", "It"),
    ]
    assert body.prompt_end is PromptEnd.CONTINUED
    assert body.template_variables() == {"enable_thinking": True, "thinking": True}
    assert body.max_reasoning_tokens == 1024
    assert body.tool_use is not None
    assert (body.tool_use.mode, body.tool_use.is_parallel) == ("required", False)


def test_a_form_and_an_effort() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    config: dict[str, Any] = {"output_config": {"format": form, "effort": "low"}}
    asks: list[dict[str, Any]] = [config, {"output_format": form}, {"guided_json": schema}]
    grammars = []
    for ask in asks:
        answer('{"a": 1}', **ask)
        grammars.append(APP.client.submitted[0].grammar)
    assert grammars[0]
    assert len(set(grammars)) == 1
    body = parse_body(MessagesBody, json.dumps(ASK | {"output_config": {"effort": "low"}}).encode())
    assert body.template_variables() == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_tokens": None}, "max_tokens: expected an integer of at least 1, got null"),
        ({"messages": []}, "messages: expected a list of 1..8192 messages, got []"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: expected text or tool_result (images and documents are not supported), got"
            " 'image'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: expected user or assistant, got 'tool'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: expected a JSON schema of an object, got null"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools: not supported: this server runs no tools, only custom is a type, got 'web_search_20250305' at [0]",
        ),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: expected only with tools, got none"),
        ({"stop_sequences": "x"}, "stop_sequences: expected a list of texts, got 'x'"),
        ({"stop": ["x"]}, "stop: not supported: its name here is stop_sequences"),
        ({"thinking": {"type": "much"}}, 'thinking: expected {"type": "enabled", "budget_tokens": N}, '),
        ({"output_config": {"format": {"type": "json"}}}, 'output_config.format: expected {"type": "json_schema", '),
        ({"output_config": {"efort": "low"}}, "output_config.efort: unknown field (did you mean 'effort'?)"),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format.schema: "),
        ({"max_token": 3}, "max_token: unknown field (did you mean 'max_tokens'?)"),
        ({"temperature": -1}, "temperature: expected a number in 0..1000000, got -1"),
    ],
)
def test_errors_have_anthropics_form(wrong: dict[str, Any], text: str) -> None:
    response = APP.post(PATH, ASK | wrong)
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(text)


def test_other_errors_too() -> None:
    assert APP.post(PATH, ASK | {"model": "x"}).json()["error"]["type"] == "not_found_error"
    failed = ScriptedApp()
    failed.client.error = RuntimeError("boom")
    body = ASK | {"stream": True}
    failed.client.generate = None  # type: ignore[assignment, method-assign]
    assert failed.post(PATH, body, [Script([[5]])]).json()["error"]["type"] == "api_error"


def test_counting_needs_no_limit_and_names_what_is_wrong() -> None:
    assert parse_body(CountTokensBody, json.dumps({"messages": ASK["messages"]}).encode()).max_tokens is None
    with pytest.raises(BadRequest, match="max_tokens: expected a value, got none"):
        parse_body(MessagesBody, json.dumps({"messages": ASK["messages"]}).encode())


def test_a_budget_of_thinking_is_held_where_marks_are_known_only() -> None:
    ask = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    plain = ScriptedApp(reasoning_parser="none")
    assert plain.post(PATH, ASK | ask, [script("Hi.")]).status_code == 200
