"""Ollama's routes over an engine that plays given texts: its answers, lines, options, errors and lists."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastdeploy_sd.entrypoints.openai.protocol import OllamaChatBody, OllamaGenerateBody, parse_body
from fastdeploy_sd.text.chat_template import Message, PromptEnd
from fastdeploy_sd.types import FinishReason
from tests.unit.entrypoints.scripted_app import ScriptedApp
from tests.unit.entrypoints.test_tool_answers import ARGUMENTS, CALL, OTHER_ARGUMENTS, PARAMETERS, TEXT, script

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": PARAMETERS}}
ASK: dict[str, Any] = {
    "model": "m:latest", "messages": [{"role": "user", "content": "hello"}], "request_id": "o1",
    "options": {"num_predict": 300},
}  # fmt: skip
TEXT_ASK: dict[str, Any] = {"model": "m", "prompt": "hello", "stream": False}
APP = ScriptedApp(tool_call_parser="hermes", reasoning_parser="qwen3")
THOUGHT = "<think>\nOne, two.\n</think>\n\n"
TIMES = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def answer(text: str, reason: FinishReason = FinishReason.STOP, **ask: Any) -> dict[str, Any]:
    response = APP.post(CHAT, ASK | {"stream": False} | ask, [script(text, 3, reason)])
    assert response.status_code == 200, response.text
    return dict(response.json())


def lines(text: str, step: int, reason: FinishReason = FinishReason.STOP, **ask: Any) -> list[dict[str, Any]]:
    response = APP.post(CHAT, ASK | ask, [script(text, step, reason)])
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that lines add up to, as clients add them up."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for i, line in enumerate(found):
        assert line["done"] is (i == len(found) - 1)
        for name in ("content", "thinking"):
            if more := line["message"].get(name):
                message[name] = message.get(name, "") + more
        if calls := line["message"].get("tool_calls"):
            message["tool_calls"] = message.get("tool_calls", []) + calls
    return found[-1] | {"message": message}


def test_a_text_is_a_message() -> None:
    told = answer("Hi there.")
    assert told["message"] == {"role": "assistant", "content": "Hi there."}
    assert (told["model"], told["done"], told["done_reason"]) == ("m", True, "stop")
    assert told["prompt_eval_count"] == len(APP.client.submitted[0].prompt_token_ids)
    assert told["eval_count"] > 3
    assert {name: told[name] for name in TIMES} == dict.fromkeys(TIMES, 1_000_000_000) | {
        "total_duration": 3_000_000_000
    }
    assert answer("One two", FinishReason.LENGTH)["done_reason"] == "length"


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", ["Hi.", TEXT, THOUGHT + "Said.", THOUGHT + CALL, CALL, ""])
def test_a_stream_adds_up_to_the_whole(text: str, step: int) -> None:
    whole, found = answer(text, tools=[TOOL]), lines(text, step, tools=[TOOL])
    assert summed(found) == whole | {"created_at": found[0]["created_at"]}


def test_thoughts_and_calls_have_their_fields() -> None:
    message = answer(THOUGHT + TEXT, tools=[TOOL])["message"]
    assert (message["thinking"], message["content"].strip()) == ("One, two.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "get", "arguments": json.loads(ARGUMENTS)},
        {"index": 1, "name": "get", "arguments": json.loads(OTHER_ARGUMENTS)},
    ]
    cut = answer(CALL[: CALL.index("Rome") + 2], FinishReason.LENGTH, tools=[TOOL])["message"]
    assert "tool_calls" not in cut
    assert cut["content"].endswith('{"city": "Ro')


def test_a_generated_text() -> None:
    response = APP.post(GENERATE, TEXT_ASK | {"system": "Be brief."}, [script(THOUGHT + "Hi.", 3, FinishReason.STOP)])
    told = response.json()
    assert (told["response"], told["thinking"], told["done_reason"]) == ("Hi.", "One, two.", "stop")
    with_turns = APP.client.submitted[0].prompt_token_ids.tolist()
    raw = APP.post(GENERATE, TEXT_ASK | {"raw": True}, [script(THOUGHT + "Hi.", 3, FinishReason.STOP)]).json()
    assert raw["response"] == THOUGHT + "Hi."
    assert len(APP.client.submitted[0].prompt_token_ids) < len(with_turns)


def test_a_model_is_loaded_already() -> None:
    for path, body in ((CHAT, {"messages": []}), (GENERATE, {"prompt": "", "keep_alive": "5m"}), (GENERATE, {})):
        told = APP.post(path, {"model": "m"} | body).json()
        assert (told["done"], told["done_reason"]) == (True, "load")
    refused = APP.post(GENERATE, {"model": "m", "keep_alive": 0})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("keep_alive: not supported: the model stays loaded")


def test_options_are_sampling_options() -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 9, "stop": ["x"],
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 4096, "num_keep": 4,
        "num_batch": 512, "num_thread": 8, "num_gpu": 99, "use_mmap": True, "mirostat": 0, "tfs_z": 1, "typical_p": 1.0,
    }  # fmt: skip
    answer("Hi.", options=options, keep_alive=-1, truncate=True)
    [request] = APP.client.submitted
    s = request.sampling
    assert (s.max_tokens, s.temperature, s.top_k, s.top_p, s.min_p, request.seed) == (7, 0.5, 3, 0.5, 0.25, 9)
    assert (s.stop, s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (("x",), 1.5, 0.5, 0.25)
    answer("Hi.", options={"repeat_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 0})
    s = APP.client.submitted[0].sampling
    assert (s.repetition_penalty, s.presence_penalty) == (1.0, 0.0)


def test_the_context_ends_an_answer() -> None:
    answer("Hi.", options={"num_predict": -1, "num_ctx": 100})
    [request] = APP.client.submitted
    assert request.max_tokens == 100 - len(request.prompt_token_ids)
    answer("Hi.", options={"num_predict": 10_000_000})
    [request] = APP.client.submitted
    assert request.max_tokens == APP.client.model_info.max_request_tokens - len(request.prompt_token_ids)
    short = APP.post(CHAT, ASK | {"options": {"num_ctx": 2}})
    assert short.json()["error"].startswith("options.num_ctx: expected more than the ")


def test_a_form_is_kept() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer('{"a": 1}', format=schema)
    as_schema = APP.client.submitted[0].grammar
    answer('{"a": 1}', format="json")
    assert as_schema
    assert APP.client.submitted[0].grammar not in ("", as_schema)
    answer("Hi.", format="")
    assert APP.client.submitted[0].grammar == ""


def test_logprobs() -> None:
    [first, *_], whole = lines("Hi there.", 1, logprobs=True, top_logprobs=2), answer("Hi there.", logprobs=True)
    assert len(first["logprobs"][0]["top_logprobs"]) == 2
    assert len(whole["logprobs"]) == whole["eval_count"]


def test_turns_are_read() -> None:
    def called(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"city": "Rome"}}}

    body = parse_body(OllamaChatBody, json.dumps({"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [called("get"), called("put")]},
        {"role": "tool", "content": "done", "tool_name": "put"},
        {"role": "tool", "content": "none"},
        {"role": "assistant", "content": "It"},
    ], "think": "high"}).encode())  # fmt: skip
    calls = tuple({"id": f"call_1_{i}", **called(name)} for i, name in enumerate(("get", "put")))
    for call in calls:
        call["type"] = "function"
    assert body.turns == [
        Message("user", "q"),
        Message("assistant", "", tool_calls=calls, reasoning_content="hm"),
        Message("tool", "done", name="put", tool_call_id="call_1_1"),
        Message("tool", "none", tool_call_id="call_1_0"),
        Message("assistant", "It"),
    ]
    assert body.prompt_end is PromptEnd.CONTINUED
    assert body.template_variables() == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert parse_body(OllamaGenerateBody, b'{"prompt": "x", "think": false}').template_variables() == {
        "enable_thinking": False, "thinking": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wrong", "text"),
    [
        (CHAT, {"options": {"temperatur": 1}}, "options.temperatur: unknown field (did you mean 'temperature'?)"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict: expected an integer in 1.."),
        (CHAT, {"options": {"repeat_last_n": 64}}, "options.repeat_last_n: not supported: penalties count all tokens"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat: not supported: only 0 is"),
        (CHAT, {"options": {"top_p": 0}}, "options.top_p: expected a number in (0, 1], got 0"),
        (CHAT, {"options": 3}, "options: expected an object, got 3"),
        (CHAT, {"think": "much"}, "think: expected true, false or one of low, medium, high, max, got 'much'"),
        (CHAT, {"format": "xml"}, "format: expected \"json\" or a JSON schema (an object), got 'xml'"),
        (CHAT, {"format": {"type": "object", "not": {}}}, "format: "),
        (CHAT, {"stream": "yes"}, "stream: expected true or false, got 'yes'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "images": ["x"]}]},
            "messages[0].images: not supported: this server has no such feature",
        ),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template: not supported: "),
        (GENERATE, {"prompt": "x", "context": [1]}, "context: not supported: send the conversation to /api/chat"),
        (GENERATE, {"prompt": "x", "images": ["x"]}, "images: not supported: "),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system: expected only without raw, got both"),
        (GENERATE, {"prompt": "x", "options": {"min_tokens": 9, "num_predict": 3}}, "min_tokens: expected at most "),
    ],
)
def test_what_cannot_be_done_is_said_in_ollamas_form(path: str, wrong: dict[str, Any], text: str) -> None:
    response = APP.post(path, (ASK if path == CHAT else {}) | wrong)
    assert response.status_code == 400
    assert response.json()["error"].startswith(text)


def test_other_errors_too() -> None:
    unknown = APP.post(CHAT, ASK | {"model": "x"})
    assert (unknown.status_code, unknown.json()["error"]) == (404, "model: expected 'm', got 'x'")
    assert APP.get("/api/pull")["error"].startswith("route: expected one of those that GET / lists")
    failed = ScriptedApp()
    failed.client.generate = None  # type: ignore[assignment, method-assign]
    response = failed.post(CHAT, ASK, [script("Hi.", 3, FinishReason.STOP)])
    assert (response.status_code, response.json()) == (
        500, {"error": "the server failed on this request; its log says why"}
    )  # fmt: skip


def test_models_are_listed_and_described() -> None:
    [listed] = APP.get("/api/tags")["models"]
    assert (listed["name"], listed["model"], len(listed["digest"])) == ("m:latest", "m:latest", 64)
    [running] = APP.get("/api/ps")["models"]
    assert running["context_length"] == APP.client.model_info.max_request_tokens
    assert tuple(map(int, APP.get("/api/version")["version"].split("."))) >= (0, 6, 4)
    shown = APP.post("/api/show", {"name": "m:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "embedding", "thinking"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == running["context_length"]
    assert APP.post("/api/show", {"model": "x"}).status_code == 404
