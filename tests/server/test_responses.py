"""/v1/responses through the real `openai` package: it answers as a chat completion of the same conversation does."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from fastdeploy_sd.entrypoints.openai.protocol import ResponseBody, parse_body
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.text.chat_template import Message
from tests.server.test_openai_client import CHAT_PROMPT
from tests.server.toy_server import MODEL, TOKENIZER, Served, serve, text_of, toy_tokens

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
BRIEF: dict[str, Any] = {"instructions": "be brief", "input": "hello"}
EVENTS = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
ENDS = ["output_text.done", "content_part.done", "output_item.done"]

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id: not supported: nothing is stored"),
    ({"conversation": "conv_1"}, "conversation: not supported: nothing is stored"),
    ({"tools": [{"type": "web_search"}]}, "tools: not supported: this server runs no tools"),
    ({"tool_choice": "required"}, "tool_choice: expected only with tools, got none"),
    ({"background": True}, "background: not supported"),
    ({"truncation": "auto"}, "truncation: not supported: prompts are never cut"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name: expected 1..64 letters, digits, _ and -"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema: expected what can be compiled, got: Unimplemented keys",
    ),
    ({"top_logprobs": 2}, "top_logprobs: expected only with message.output_text.logprobs in include"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs: expected an integer in 0..20"),
    ({"include": ["x"]}, "include: expected some of"),
    ({"messages": [{"role": "user"}]}, "messages: not supported: its name here is input"),
    ({"max_tokens": 5}, "max_tokens: not supported: its name here is max_output_tokens"),
    ({"n": 2}, "n: not supported: a Response has one text"),
    ({"input": []}, "input: expected text or a list of 1.."),
    ({"input": None}, "input: expected text or a list of 1.."),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role: expected one of system, developer, user,"),
    (
        {"input": [{"role": "user", "content": "a"}, 5]},
        "input[1]: expected an item, one of message, function_call,",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: expected one of message, function_call,"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content: expected text or a list of",
    ),
    ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name: expected text, got null"),
    ({"max_output_tokens": 100_000}, "max_output_tokens: expected at most 501"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation: not supported"),
]


async def prompt_of(served: Served, **ask: Any) -> str:
    """What the model is asked."""
    served.client.submitted.clear()
    await served.api.responses.create(**ASK, **ask)
    [request] = served.client.submitted
    return TOKENIZER.decode(request.prompt_token_ids.tolist(), skip_hidden=False)


async def test_a_response_has_the_text_of_a_chat_completion() -> None:
    async with serve() as s:
        answer = await s.api.responses.create(**ASK, **BRIEF, top_p=0.5, metadata={"tag": "x"}, store=True)
        [request] = s.client.submitted
    assert request.prompt_token_ids.tolist() == CHAT_PROMPT
    assert answer.output_text == text_of(toy_tokens(CHAT_PROMPT, 8))
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", MODEL)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0, 0.5, 8)
    assert (answer.instructions, answer.metadata) == ("be brief", {"tag": "x"})
    assert json.loads(answer.to_json())["store"] is False, "nothing is stored, and it says so"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(CHAT_PROMPT), 8)
    assert answer.usage.total_tokens == len(CHAT_PROMPT) + 8


async def test_a_stream_has_openais_events_in_openais_order() -> None:
    stop = text_of(toy_tokens(CHAT_PROMPT, 8)[5:7])
    async with serve() as s:
        whole = await s.api.responses.create(**ASK, **BRIEF, extra_body={"stop": stop, "request_id": "resp_1"})
        asked: Any = {"stream": True, "extra_body": {"stop": stop, "request_id": "resp_1"}}
        events = [event async for event in await s.api.responses.create(**ASK, **BRIEF, **asked)]
        async with s.api.responses.stream(**ASK, **BRIEF, extra_body={"stop": stop}) as stream:
            helped = await stream.get_final_response()
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    names = [*EVENTS, *EVENTS[-1:] * (len(deltas) - 1), *ENDS, "completed"]
    assert [event.type for event in events] == [f"response.{name}" for name in names]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begun, last = events[0], events[-1]
    assert begun.type == "response.created"
    assert begun.response.status == "in_progress"
    assert begun.response.output == []
    assert last.type == "response.completed"
    assert last.response.output_text == "".join(deltas) == whole.output_text == helped.output_text
    others: dict[str, Any] = {"created_at": 0, "usage": None}  # what differs: the time, and what was in the cache
    assert whole.to_dict() | others == last.response.to_dict() | others
    ids = {event.item_id for event in events if event.type == "response.output_text.done"}
    assert ids == {whole.output[0].id}


async def test_a_stream_without_text_has_all_its_events() -> None:
    first = text_of(toy_tokens(CHAT_PROMPT, 1))
    async with serve() as s:
        asked: Any = {"stream": True, "extra_body": {"stop": first[0]}}
        events = [event.type async for event in await s.api.responses.create(**ASK, **BRIEF, **asked)]
    assert events == [f"response.{name}" for name in [*EVENTS[:-1], *ENDS, "completed"]]


async def test_the_conversation_is_what_the_items_say() -> None:
    text = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    items: list[Any] = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": text},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "three", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "four"},
    ]  # fmt: skip
    async with serve() as s:
        prompt = await prompt_of(s, input=items)
        s.client.submitted.clear()
        messages: Any = [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ]
        await s.api.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        [request] = s.client.submitted
    assert prompt == TOKENIZER.decode(request.prompt_token_ids.tolist(), skip_hidden=False)
    assert [prompt.count(word) for word in ("rules", "one\ntwo", "three", "four")] == [1] * 4


def test_calls_of_tools_in_a_history_are_turns() -> None:
    calls = [{"type": "function_call", "call_id": name, "name": f"f{name}", "arguments": "{}"} for name in "ab"]
    part = {"type": "input_text", "text": "2"}
    outputs = [{"type": "function_call_output", "call_id": n, "output": o} for n, o in (("a", "1"), ("b", [part]))]
    items = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "well"}, *calls, *outputs, calls[0]]
    body = parse_body(ResponseBody, json.dumps({"input": items, "instructions": "i"}).encode())
    made: list[dict[str, Any]] = [
        {"id": n, "type": "function", "function": {"name": f"f{n}", "arguments": "{}"}} for n in "ab"
    ]
    assert body.turns == [
        Message("system", "i"),
        Message("user", "q"),
        Message("assistant", "well", tool_calls=tuple(made)),
        Message("tool", "1", tool_call_id="a"),
        Message("tool", "2", tool_call_id="b"),
        Message("assistant", "", tool_calls=(made[0],)),
    ]


async def test_a_second_turn_takes_the_output_as_it_came(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as s:
        first = await s.api.responses.create(**ASK, input="hello")
        question = {"role": "user", "content": "hello"}
        again = {"role": "user", "content": "and now?"}
        history: Any = [question, *first.output, again]
        dumped: Any = [question, *(item.model_dump() for item in first.output), again]
        prompts = {await prompt_of(s, input=items) for items in (history, dumped)}
    assert len(prompts) == 1
    assert first.output_text in prompts.pop()
    assert "left aside" not in caplog.text, "what every item of OpenAI's has is no news"


async def test_what_is_wrong_or_missing_here_is_named() -> None:
    async with serve() as s:
        for change, text in FAULTS:
            with pytest.raises(openai.BadRequestError) as told:
                await s.api.responses.create(model=MODEL, extra_body={"input": "x", **change})
            error: Any = told.value.body
            assert error["message"].startswith(text)
            assert error["param"] == re.split(r"[:.\[]", text)[0]


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}},
        {
            "truncation": "disabled",
            "background": False,
            "service_tier": "auto",
            "user": "u",
            "previous_response_id": None,
        },
    ],
)
async def test_what_asks_for_nothing_is_taken(neutral: dict[str, Any]) -> None:
    async with serve() as s:
        answer = await s.api.responses.create(model=MODEL, input="x", max_output_tokens=1, extra_body=neutral)
    assert answer.output_text


async def test_a_stream_that_fails_ends_in_an_error_event() -> None:
    async with serve() as s:
        stream = await s.api.responses.create(**ASK | {"max_output_tokens": 400}, input="x", stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.sequence_number == 6:
                await s.client.die(InternalError("the engine failed"))
    last = events[-1]
    assert last.type == "error"
    assert (last.code, last.message) == ("internal_error", "the engine failed")
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_client_that_leaves_frees_its_request() -> None:
    async with serve() as s:
        s.client.running.clear()
        asking = asyncio.create_task(s.api.responses.create(**ASK, input="x"))
        await s.client.until("started")
        asking.cancel()
        s.client.running.set()
        await s.client.until("idle")
        assert len(s.client.aborted) == 1


async def test_a_response_cannot_be_asked_for_again() -> None:
    async with serve() as s:
        responses = s.api.responses
        for ask in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="none is stored, got 'resp_1'"):
                await ask("resp_1")


async def test_embeddings_of_what_has_no_hidden_rows_are_refused_in_a_way_that_clients_understand() -> None:
    async with serve() as s:
        with pytest.raises(
            openai.BadRequestError, match="embeddings: not supported by what computes this model"
        ) as told:
            await s.api.embeddings.create(model=MODEL, input="x")
    assert told.value.code == "not_supported"
