"""Every field that OpenAI's own package can send is known here, and what other servers call differently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params import reasoning

from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, CompletionBody, ResponseBody, parse_body
from fastdeploy_sd.entrypoints.openai.protocol.generation import StreamOptions
from fastdeploy_sd.entrypoints.openai.protocol.response import Reasoning, ResponseStreamOptions, TextOptions
from tests.unit.entrypoints.scripted_app import CHAT, Script, ScriptedApp

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatCompletionBody),
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
        (response_create_params.ResponseCreateParamsBase, ResponseBody),
        (chat_completion_stream_options_param.ChatCompletionStreamOptionsParam, StreamOptions),
        (response_create_params.StreamOptions, ResponseStreamOptions),
        (reasoning.Reasoning, Reasoning),
        (ResponseTextConfigParam, TextOptions),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fields(params: Any, body: Any) -> None:
    assert [name for name in params.__annotations__ if name not in body.model_fields] == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"web_search_options": {}}, "web_search_options: not supported: this server does not search the web"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "events are not padded"),
        ({"moderation": {"model": "m"}}, "moderation: not supported"),
        ({"best_of": 3}, "best_of: not supported: only the value of n"),
        ({"modalities": ["text", "audio"]}, "modalities: not supported"),
    ],
)
def test_what_is_not_there_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    answer = ScriptedApp().post(CHAT, HELLO | fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
    assert word in answer.json()["error"]["message"]


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "a"{2,3}'
JSON_OBJECT = {"type": "json_object"}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"regex": "a|b"}, {"guided_regex": "a|b"}),
    ({"ebnf": GBNF}, {"guided_grammar": GBNF}),
    ({"grammar": GBNF}, {"guided_grammar": GBNF}),
    ({"json_schema": SCHEMA}, {"guided_json": SCHEMA}),
    ({"response_format": JSON_OBJECT | {"schema": SCHEMA}}, {"guided_json": SCHEMA}),
    ({"response_format": JSON_OBJECT | {"schema": None}}, {"response_format": JSON_OBJECT}),
    ({"grammar": "", "regex": "", "ebnf": "", "json_schema": ""}, {}),
    # guidance sends old and new names at once.
    ({"structured_outputs": {"grammar": GBNF}, "guided_grammar": GBNF}, {"guided_grammar": GBNF}),
    ({"response_format": JSON_OBJECT, "guided_json_object": True, "regex": ""}, {"response_format": JSON_OBJECT}),
]


@pytest.mark.parametrize(("sent", "meant"), FORMS)
def test_forms_by_other_names_are_the_same(sent: dict[str, Any], meant: dict[str, Any]) -> None:
    app = ScriptedApp()
    grammars = []
    for fields in (sent, meant):
        assert app.post(CHAT, HELLO | fields, [Script([[5]])]).status_code == 200
        grammars.append(app.client.submitted[0].grammar)
    assert grammars[0] == grammars[1]
    assert bool(grammars[0]) is bool(meant)


def test_a_limit_of_the_thinking_has_two_names() -> None:
    for fields in ({"thinking_token_budget": 7}, {"thinking_token_budget": 7, "reasoning_max_tokens": 7}):
        assert parse_body(ChatCompletionBody, json.dumps(HELLO | fields).encode()).max_reasoning_tokens == 7
