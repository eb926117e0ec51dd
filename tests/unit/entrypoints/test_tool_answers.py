"""Calls of functions in answers, over an engine that plays given texts: a stream adds up to the whole on each route."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.cluster.route import ChoiceProgress, Progress
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart
from fastdeploy_sd.entrypoints.openai.choice_format import ChatFormat
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.job_builder import JobBuilder
from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, ResponseBody, parse_body
from fastdeploy_sd.entrypoints.openai.response_format import ResponseFormat
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.answer_parts import PartsDelta, tool_call_id
from fastdeploy_sd.text.output_processor import OutputProcessor
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import FinishReason, RequestOutput
from tests.unit.entrypoints.scripted_app import CHAT, INFO, Script, ScriptedApp
from tests.unit.text.vocabularies import GOLDEN, golden_tokenizer

TOKENIZER = golden_tokenizer()
RESPONSES = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": PARAMETERS}}
FLAT = {"type": "function", "name": "get", "description": "Gets.", "parameters": PARAMETERS}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "request_id": "x"}
ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "get", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER_ARGUMENTS = '{"city": "Oslo"}'
TEXT = f"I look.\n{CALL}\n{CALL.replace(ARGUMENTS, OTHER_ARGUMENTS)}"
REPEAT = f"{TEXT}\n{CALL}\n{CALL} And so on."


def script(text: str, step: int = 3, reason: FinishReason = FinishReason.STOP) -> Script:
    """A text in steps of some tokens; one that stops by itself has a token more that does not show."""
    ids = TOKENIZER.encode(text, add_special_tokens=False) + ([2] if reason is FinishReason.STOP else [])
    return Script([ids[i : i + step] for i in range(0, len(ids), step)], reason)


APP = ScriptedApp(tool_call_parser="hermes")
AUTO = ScriptedApp(tool_call_parser="auto")


def message(text: str, app: ScriptedApp = APP, **ask: Any) -> dict[str, Any]:
    """The only choice of the whole answer."""
    answer = app.post(CHAT, ASK | ask, [script(text)]).json()
    [choice] = answer["choices"]
    return dict(choice)


def streamed(text: str, step: int, app: ScriptedApp = APP, **ask: Any) -> dict[str, Any]:
    """The choice that a stream adds up to, as clients add it up."""
    told: dict[str, Any] = {"content": None, "tool_calls": []}
    last: dict[str, Any] = {}
    chunks = app.chunks(CHAT, ASK | ask, [script(text, step)])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            last = choice
            delta = choice["delta"]
            if delta.get("content"):
                told["content"] = (told["content"] or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(told["tool_calls"]):
                    told["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    assert call.keys() == {"index", "function"}
                    function = told["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    assert last["delta"] == {}
    return {"message": told, "finish_reason": last["finish_reason"]}


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "text",
    [TEXT, CALL, TEXT + "\nDone.", "Hello.", "<tool_call>oops", CALL[:-20], CALL[:30], REPEAT, f"{CALL}{CALL[:-30]}"],
)
def test_a_stream_adds_up_to_the_whole(text: str, step: int) -> None:
    whole = message(text)
    expected = {"content": whole["message"]["content"], "tool_calls": whole["message"].get("tool_calls", [])}
    assert streamed(text, step) == {"message": expected, "finish_reason": whole["finish_reason"]}


@pytest.mark.parametrize("step", [1, 5, 100])
def test_a_call_in_a_fence_is_a_call_by_default(step: int) -> None:
    """Not where the server was told another format, nor where the answer is to be JSON."""
    call = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
    for text in (f"```json\n{call}\n```\n", call, f"```json\n{CALL}\n```"):
        whole = message(text, AUTO)
        function = {"name": "get", "arguments": ARGUMENTS}
        calls = [{"id": tool_call_id("x", 0, 0), "type": "function", "function": function}]
        assert (whole["message"]["content"], whole["message"]["tool_calls"]) == (None, calls)
        expected = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
        assert streamed(text, step, AUTO) == expected
    for text in (f"As JSON:\n```json\n{call}\n```", "```python\nget('Rome')\n```", '{"city": "Rome"}'):
        assert streamed(text, step, AUTO) == {"message": {"content": text, "tool_calls": []}, "finish_reason": "stop"}
    assert message(call)["message"]["content"] == call
    assert message(call, AUTO, response_format={"type": "json_object"})["message"]["content"] == call


def test_calls_have_openais_form() -> None:
    choice = message(TEXT)
    calls = [
        {"id": tool_call_id("x", 0, i), "type": "function", "function": {"name": "get", "arguments": arguments}}
        for i, arguments in enumerate((ARGUMENTS, OTHER_ARGUMENTS))
    ]
    assert choice["message"] == {"role": "assistant", "content": "I look.", "tool_calls": calls}
    assert choice["finish_reason"] == "tool_calls"
    assert message(CALL)["message"]["content"] is None
    assert message("Hello.")["finish_reason"] == "stop"
    assert message(CALL, stop="Rome")["finish_reason"] == "tool_calls", "a stop string ends a call as any text"
    cut = APP.post(CHAT, ASK, [script(CALL, reason=FinishReason.LENGTH)]).json()["choices"][0]
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_repeated_call_ends_the_answer(step: int) -> None:
    """With the token that completes it, however many more a step brought; the engine is told to stop."""
    expected = message(TEXT)
    ask = ASK | {"return_token_ids": True}
    [choice] = APP.post(CHAT, ask, [script(REPEAT, step, FinishReason.LENGTH)]).json()["choices"]
    ids = choice["message"].pop("completion_token_ids")
    del choice["message"]["prompt_token_ids"]
    assert (choice["message"], choice["finish_reason"]) == (expected["message"], "tool_calls")
    assert choice["stop_reason"] is None
    kept = TOKENIZER.decode(ids, skip_hidden=True)
    assert kept.startswith(f"{TEXT}\n{CALL[: CALL.index('}')]}")
    assert len(kept) < len(f"{TEXT}\n{CALL}\n")
    assert [*APP.client.aborted.values()] == ([FinishReason.STOP] if step < 1000 else [])
    late = APP.post(CHAT, ask | {"min_tokens": len(ids) + 3}, [script(REPEAT, step)]).json()["choices"][0]
    assert len(late["message"]["completion_token_ids"]) == len(ids) + 3
    assert late["message"]["tool_calls"] == choice["message"]["tool_calls"]


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_wanted_calls_end_where_the_model_begins_no_other(step: int) -> None:
    calls = TEXT.removeprefix("I look.\n")
    expected = message(calls, tool_choice="required")
    text = f"{calls}\n```\nThese calls\n{CALL}"
    ask = ASK | {"tool_choice": "required"}
    answer = APP.post(CHAT, ask, [script(text, step, FinishReason.LENGTH)]).json()
    [choice] = answer["choices"]
    assert (choice["message"], choice["finish_reason"]) == (expected["message"], "tool_calls")
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 2
    assert (
        answer["usage"]["completion_tokens"] < len(TOKENIZER.encode(f"{calls}\n```\nT", add_special_tokens=False)) + 1
    )
    told = streamed(text, step, tool_choice="required")
    assert told["message"] == {"content": None, "tool_calls": choice["message"]["tool_calls"]}
    assert message(f"{CALL}\nDone.")["message"]["content"] == "\nDone.", "text after free calls stays"


def test_each_choice_has_calls_of_its_own_and_tokens_of_the_whole_text() -> None:
    ask = ASK | {"n": 2, "logprobs": True, "return_token_ids": True}
    choices = APP.post(CHAT, ask, [script(CALL), script("Hello.")]).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]
    assert [len(c["logprobs"]["content"]) for c in choices] == [
        len(c["message"]["completion_token_ids"]) for c in choices
    ]
    choices = APP.post(CHAT, ask, [script(CALL), script(CALL)]).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_without_functions_a_call_is_text() -> None:
    asks: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}, {"tools": None}]
    for ask in asks:
        choice = message(TEXT, **ask)
        assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
    other: Any = TOOL | {"function": {"name": "put"}}
    assert message(CALL, tools=[other])["message"]["content"] == CALL, "a client gets calls of what it offers"


def test_the_older_names() -> None:
    ask: dict[str, Any] = {"tools": None, "functions": [TOOL["function"]], "function_call": "auto"}
    choice = message(CALL, **ask)
    assert choice["message"]["function_call"] == {"name": "get", "arguments": ARGUMENTS}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    deltas = [c["choices"][0]["delta"] for c in APP.chunks(CHAT, ASK | ask, [script(CALL)]) if c["choices"]]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert pieces[0]["name"] == "get"
    assert "".join(piece["arguments"] for piece in pieces) == ARGUMENTS


def prompt(**ask: Any) -> str:
    APP.post(CHAT, ASK | ask, [script("Hello.")])
    [request] = APP.client.submitted
    return TOKENIZER.decode(request.prompt_token_ids.tolist(), skip_hidden=False)


def test_a_template_without_a_place_for_functions_gets_words() -> None:
    text = prompt()
    assert json.dumps(TOOL["function"]) in text
    assert "<tool_call>" in text
    assert "<tool_call>" not in prompt(tool_choice="none")
    calls = [{"id": "c", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "sunny <|im_end|>"},
    ]
    text = prompt(messages=turns)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nsunny <|im_end|>\n</tool_response><|im_end|>" in text
    assert APP.client.submitted[0].prompt_token_ids.tolist().count(2) == 4, "a result's control token is text"
    counted = APP.post("/tokenize", {"messages": ASK["messages"], "tools": [TOOL]}).json()
    assert TOKENIZER.decode(counted["tokens"], skip_hidden=False) == prompt()


@pytest.mark.parametrize("arguments", ['{"city": "R', '{"city":"Rome"}{}', '{"city": 1E400, "n": 1e2}'])
def test_every_route_takes_the_call_of_an_earlier_answer_back(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": arguments}}
    turns: list[Any] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cut"},
    ]
    text = prompt(messages=turns)
    assert f'{{"name": "get", "arguments": {arguments}}}' in text
    counted = APP.post("/tokenize", {"messages": turns, "tools": [TOOL]}).json()
    assert TOKENIZER.decode(counted["tokens"], skip_hidden=False) == text
    items = [
        turns[0],
        {"type": "function_call", "call_id": "c", "name": "get", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "cut"},
    ]
    assert APP.post(RESPONSES, {"input": items, "tools": [FLAT]}, [script("ok")]).status_code == 200
    assert TOKENIZER.decode(APP.client.submitted[0].prompt_token_ids.tolist(), skip_hidden=False) == text


def test_arguments_in_an_object_have_numbers_that_a_float_holds() -> None:
    call = {"function": {"name": "f", "arguments": {"n": [1e308]}}}
    body = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert parse_body(ChatCompletionBody, body.encode()).messages[0].calls[0]["function"] == call["function"]
    with pytest.raises(BadRequest, match="expected arguments as text where they have a number"):
        parse_body(ChatCompletionBody, body.replace("1e+308", "1e400").encode())


def test_wanted_calls_have_a_grammar_and_others_none() -> None:
    for choice, is_guided in (
        ("auto", False),
        ("required", True),
        ({"type": "function", "function": {"name": "get"}}, True),
    ):
        APP.post(CHAT, ASK | {"tool_choice": choice}, [script(CALL)])
        assert bool(APP.client.submitted[0].grammar) == is_guided


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "integer", "minimum": "x"}, "tools.get.parameters/properties/a/minimum: expected a number"),
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "tools.get.parameters: expected a regular expression of"),
    ],
)
def test_schemas_of_wanted_calls_are_checked_as_those_of_answers_are(schema: Any, error: str) -> None:
    wrong = {"name": "get", "parameters": {"properties": {"a": schema}}}
    answer = APP.post(CHAT, ASK | {"tools": [{"function": wrong}], "tool_choice": "required"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(error)


@pytest.mark.slow
def test_a_grammar_too_long_for_an_engine_names_the_field_that_asks_for_it() -> None:
    answer = APP.post(CHAT, {"messages": ASK["messages"], "guided_choice": ['"' * (1 << 16)]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "guided_choice: expected what takes a grammar of at most 131072"
    )
    assert answer.json()["error"]["param"] == "guided_choice"


def test_an_answer_that_calls_nothing_may_have_a_grammar_too() -> None:
    APP.post(CHAT, ASK | {"response_format": {"type": "json_object"}}, [script(CALL)])
    grammar = APP.client.submitted[0].grammar
    assert "%lark" in grammar
    assert "<tool_call>" in grammar
    APP.post(CHAT, ASK | {"response_format": {"type": "json_object"}, "tool_choice": "none"}, [script("{}")])
    assert "<tool_call>" not in APP.client.submitted[0].grammar
    answer = APP.post(CHAT, ASK | {"tool_choice": "required", "ignore_eos": True})
    assert answer.json()["error"]["param"] == "ignore_eos"


def test_a_server_without_a_parser_refuses_functions() -> None:
    answer = ScriptedApp(tool_call_parser=None).post(CHAT, ASK)
    assert answer.status_code == 400
    assert "tool_call_parser none" in answer.json()["error"]["message"]


# ---- /v1/responses --------------------------------------------------------------------------------------------------

RESPONSE_ASK: dict[str, Any] = {"input": "hello", "tools": [FLAT], "request_id": "resp_x"}


def events(text: str, step: int, **ask: Any) -> list[dict[str, Any]]:
    answer = APP.post(RESPONSES, RESPONSE_ASK | {"stream": True} | ask, [script(text, step)]).text
    return [json.loads(block.split("data: ")[1]) for block in answer.split("\n\n") if block]


@pytest.mark.parametrize("step", [1, 4, 100])
def test_calls_are_items_of_a_response(step: int) -> None:
    whole = APP.post(RESPONSES, RESPONSE_ASK, [script(TEXT)]).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "I look."
    call = whole["output"][1]
    assert (call["name"], call["arguments"], call["status"]) == ("get", ARGUMENTS, "completed")
    assert call["call_id"] == tool_call_id("resp_x", 0, 0)
    assert (whole["tool_choice"], whole["parallel_tool_calls"]) == ("auto", True)
    assert whole["tools"] == [FLAT | {"strict": False}]
    stream = events(TEXT, step)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert stream[-1]["type"] == "response.completed"
    assert stream[-1]["response"]["output"] == whole["output"]
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    told = "".join(e["delta"] for e in stream if e["type"] == "response.function_call_arguments.delta")
    assert told == ARGUMENTS + OTHER_ARGUMENTS


def test_results_of_calls_come_back_as_items() -> None:
    first = APP.post(RESPONSES, RESPONSE_ASK, [script(CALL)]).json()["output"]
    items = [{"role": "user", "content": "hello"}, *first]
    items.append({"type": "function_call_output", "call_id": first[0]["call_id"], "output": "sunny"})
    answer = APP.post(
        RESPONSES, RESPONSE_ASK | {"input": items, "tool_choice": {"type": "function", "name": "get"}}, [script("Yes.")]
    )
    assert answer.json()["tool_choice"] == {"type": "function", "name": "get"}
    [request] = APP.client.submitted
    text = TOKENIZER.decode(request.prompt_token_ids.tolist(), skip_hidden=False)
    assert f"{CALL}<|im_end|>" in text
    assert "sunny" in text


# ---- streams that go on at another instance -------------------------------------------------------------------------


def parts(job: GenerationJob, form: AnswerFormat, steps: Sequence[RequestOutput]) -> list[StreamPart | None]:
    """What each delta adds to a stream."""
    processor = OutputProcessor(job.requests[0], TOKENIZER, job.answer.shown_ids)
    usage = form.usage_counter()
    told = []
    for step in steps:
        delta = processor.process(step)
        usage.add(0, delta)
        told.append(form.part(0, delta, usage))
    return told


@pytest.mark.parametrize("text", [TEXT + "\nDone.", CALL[:-30], f"{TEXT}\n{CALL[:-30]}"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_goes_on_at_another_instance(text: str, is_chat: bool) -> None:
    """Behind any of its events the others follow, byte for byte, whatever call was half told."""
    encoder = PromptEncoder(TOKENIZER)
    config = Config(model=ModelConfig(model=str(GOLDEN), served_model_name=("m",), tool_call_parser="hermes"))
    builder = JobBuilder(encoder, INFO, config, lambda *_: None)
    form: type[AnswerFormat] = ChatFormat if is_chat else ResponseFormat
    ask = {**(ASK if is_chat else RESPONSE_ASK), "stream": True}
    if is_chat:
        job = builder.build_chat(parse_body(ChatCompletionBody, json.dumps(ask).encode()))
    else:
        job = builder.build_response(parse_body(ResponseBody, json.dumps(ask).encode()))
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), 2]
    reasons = [None] * (len(ids) - 1) + [FinishReason.STOP]
    outputs = [RequestOutput("x", (i,), finish_reason=reason) for i, reason in zip(ids, reasons, strict=True)]
    told = parts(job, form(job, TOKENIZER), outputs)
    num_events = 0
    for n, part in enumerate(told[:-1], 1):
        num_events += part.num_events if part is not None else 0
        if part is None:
            continue
        progress = Progress(
            job.job_id, job.created, job.requests.seeds, (ChoiceProgress(tuple(ids[:n])),), False, num_events
        )
        resumed = job.routed(None, progress)
        assert parts(resumed, form(resumed, TOKENIZER), outputs[n:]) == told[n:]


# ---- models whose marks are hidden tokens ---------------------------------------------------------------------------


def test_marks_that_text_hides_are_read_and_guided_as_tokens(tmp_path: Path) -> None:
    """As in Mistral's vocabularies, where [TOOL_CALLS] is a control token."""
    files = (GOLDEN / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    for file in files:
        (tmp_path / file.name).write_text(file.read_text().replace("<pad>", "[TOOL_CALLS]"))
    tokenizer = load_tokenizer(tmp_path)
    mark = tokenizer.control_tokens["[TOOL_CALLS]"]
    assert mark in tokenizer.hidden_ids
    encoder = PromptEncoder(tokenizer)
    config = Config(model=ModelConfig(model=str(tmp_path), served_model_name=("m",), tool_call_parser="mistral"))
    builder = JobBuilder(encoder, INFO, config, lambda *_: None)
    ask = ASK | {"prompt_token_ids": [5], "messages": [], "tool_choice": "required"}
    job = builder.build_chat(parse_body(ChatCompletionBody, json.dumps(ask).encode()))
    assert job.answer.shown_ids == (mark,)
    assert f"<[{mark}]>" in job.requests.grammar
    ids = (mark, *tokenizer.encode(f'[{{"name": "get", "arguments": {ARGUMENTS}}}]', add_special_tokens=False), 2)
    processor = OutputProcessor(job.requests[0], tokenizer, job.answer.shown_ids)
    text = processor.process(RequestOutput("x", ids, finish_reason=FinishReason.STOP)).text
    assert text.startswith("[TOOL_CALLS][")
    parser = job.answer.parser()
    told = PartsDelta.of(parser.push(text) + parser.finish())
    assert (told.content, [call.arguments for call in told.tool_calls]) == ("", [ARGUMENTS])
    plain = builder.build_chat(parse_body(ChatCompletionBody, json.dumps(ask | {"tool_choice": "none"}).encode()))
    assert plain.answer.shown_ids == (), "without functions the mark stays hidden"
