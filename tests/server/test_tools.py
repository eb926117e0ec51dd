"""Guided calls of functions on the demo model through the `openai` package: they always parse, whatever made them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fastdeploy_sd
from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.text.channels import END, MARKS
from tests.server.test_api_e2e import RunningServer
from tests.unit.text.vocabularies import CHANNEL_TEMPLATE

pytestmark = pytest.mark.slow

MODEL = "demo"
DEMO = Path(fastdeploy_sd.__file__).parent / "demo_model"
VOCABULARY = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
UNUSED = "\u00f5\u00f6\u00f7\u00f8\u00f9\u00fa\u00fb"  # bytes that no text has, as the vocabulary writes them
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
FLAT: list[Any] = [{"type": "function", **FUNCTION}]
BIAS = {VOCABULARY[UNUSED[MARKS.index(END)]]: 100.0}  # a model that begins to think ends it at once
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": TOOLS,
    "max_tokens": 200,
    "parallel_tool_calls": False,
    "logit_bias": {str(token_id): bias for token_id, bias in BIAS.items()},
}
CLOSED = PARAMETERS | {"additionalProperties": False}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["hermes", "harmony"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model as it is; and with a template of gpt-oss's form, whose marks are bytes that no text has."""
    if request.param == "hermes":
        return MODEL
    directory = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(DEMO, directory, ignore=shutil.ignore_patterns("eagle*", "hydra", "medusa", "mlp_speculator"))
    spec = json.loads((directory / "tokenizer.json").read_text())
    for byte, mark in zip(UNUSED, MARKS, strict=True):
        token_id = spec["model"]["vocab"][mark] = spec["model"]["vocab"].pop(byte)
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": token_id, "content": mark})
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    (directory / "chat_template.jinja").write_text(CHANNEL_TEMPLATE)
    return str(directory)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[RunningServer]:
    running = RunningServer("qwen3-tiny", {"model": model, "served-model-name": MODEL})
    yield running
    assert running.stop() == 0


def verify(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_wanted_calls_are_valid_and_a_stream_adds_up_to_them(server: RunningServer, choice: Any) -> None:
    """Sampled at a high temperature, where free text is noise; with drafts and without them it is the same."""
    for seed in range(4):
        ask = ASK | {"tool_choice": choice, "seed": seed, "temperature": 1.5}
        whole = server.api.chat.completions.create(**ask).choices[0]
        assert whole.message.content is None
        assert whole.finish_reason == "tool_calls"
        assert whole.message.tool_calls is not None
        [call] = whole.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        verify(call.function.arguments)
        plain: Any = {"extra_body": {"speculation": {"enabled": False}}}
        [other] = server.api.chat.completions.create(**ask, **plain).choices[0].message.tool_calls or []
        assert other.type == "function"
        assert other.function == call.function
        with server.api.chat.completions.stream(**ask) as stream:
            [told] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert (told.function.name, told.function.arguments) == (call.function.name, call.function.arguments)


def test_a_guided_text_is_the_content(server: RunningServer) -> None:
    """With functions that may be called too: then it is either."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": CLOSED}}
    for tools in ([], TOOLS):
        for seed in range(3):
            ask = {key: ASK[key] for key in ("model", "messages", "max_tokens", "logit_bias")}
            ask |= {"response_format": form, "seed": seed, "temperature": 1.5}
            ask |= {"tools": tools, "parallel_tool_calls": False} if tools else {}
            message = server.api.chat.completions.create(**ask).choices[0].message
            if not message.tool_calls:
                verify(message.content or "")
            pieces = server.api.chat.completions.create(**ask, stream=True)
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == (message.content or "")


def test_a_repeated_call_ends_the_answer_whoever_drafts(server: RunningServer) -> None:
    """Functions without parameters, so that a third call repeats one; the tokens, too, are the same without drafts."""
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("now", "today")]
    ask: dict[str, Any] = ASK | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": True}
    for temperature in (0, 1):
        answers = [
            server.api.chat.completions.create(**ask, seed=5, temperature=temperature, extra_body={"speculation": how})
            for how in ({"enabled": True}, {"enabled": False})
        ]
        calls = [
            [call.function.name for call in answer.choices[0].message.tool_calls or [] if call.type == "function"]
            for answer in answers
        ]
        assert len({*calls[0]}) == len(calls[0]) <= len(tools)
        assert calls[0] == calls[1]
        assert [answer.choices[0].finish_reason for answer in answers] == ["tool_calls"] * 2
        tokens = [answer.usage.completion_tokens for answer in answers if answer.usage is not None]
        assert tokens[0] == tokens[1] < 100


def test_wanted_calls_of_a_response_are_items(server: RunningServer) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "What is the weather in Rome?", "tools": FLAT, "temperature": 0}
    ask |= {"tool_choice": "required", "max_output_tokens": 200, "parallel_tool_calls": False}
    ask |= {"extra_body": {"logit_bias": ASK["logit_bias"]}}
    whole = server.api.responses.create(**ask)
    item = whole.output[-1]  # after what was thought, if anything
    assert item.type == "function_call"
    verify(item.arguments)
    with server.api.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    told = final.output[-1]
    assert told.type == "function_call"
    assert told.arguments == item.arguments
    assert "response.function_call_arguments.delta" in [event.type for event in events]
    items: list[Any] = [{"role": "user", "content": "Rome?"}, item.to_dict()]
    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "sunny"})
    assert server.api.responses.create(**ask | {"input": items, "tool_choice": "auto"}).status in (
        "completed",
        "incomplete",
    )


def test_a_result_comes_back_in_the_next_turn(server: RunningServer) -> None:
    ask = ASK | {"tool_choice": NAMED, "temperature": 0}
    message = server.api.chat.completions.create(**ask).choices[0].message
    [call] = message.tool_calls or []
    turns = [*ASK["messages"], message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = server.api.chat.completions.create(**ASK | {"messages": turns, "tool_choice": "none", "temperature": 0})
    assert answer.choices[0].message.tool_calls is None


def test_offline_calls_are_those_of_the_server(server: RunningServer, model: str) -> None:
    """And the conversation goes on with them."""
    with LLM(model, dtype="float32", num_gpu_blocks_override=128) as llm:
        for choice in ("required", NAMED):
            params = SamplingParams(seed=3, temperature=1.5, max_tokens=200, n=2, logit_bias=BIAS)
            [output] = llm.chat(
                ASK["messages"], params, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, use_tqdm=False
            )
            choices = server.api.chat.completions.create(
                **ASK | {"tool_choice": choice, "seed": 3, "temperature": 1.5, "n": 2}
            ).choices
            for message, expected in zip(output.messages, choices, strict=True):
                [call] = message.tool_calls
                [theirs] = expected.message.tool_calls or []
                assert theirs.type == "function"
                assert (call.name, call.arguments) == (theirs.function.name, theirs.function.arguments)
                assert (message.content, message.reasoning) == ("", "")
        assert len({call.id for message in output.messages for call in message.tool_calls}) == 2
        turn = output.messages[0].as_turn()
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "sunny"}
        turns, greedy = [*ASK["messages"], turn, result], SamplingParams(temperature=0, max_tokens=20)
        [last] = llm.chat(turns, greedy, tools=TOOLS, tool_choice="none", use_tqdm=False)
        ask = ASK | {"messages": turns, "tool_choice": "none", "temperature": 0, "max_tokens": 20, "logit_bias": None}
        answer = server.api.chat.completions.create(**ask)
        assert last.messages[0].content == answer.choices[0].message.content
        assert not last.messages[0].tool_calls


def test_calls_of_several_choices_have_ids_of_their_own(server: RunningServer) -> None:
    choices = server.api.chat.completions.create(**ASK | {"tool_choice": "required", "n": 3, "logprobs": True}).choices
    calls = [call for choice in choices for call in choice.message.tool_calls or []]
    assert len({call.id for call in calls}) == 3
    assert all(choice.logprobs is not None and choice.logprobs.content for choice in choices)
