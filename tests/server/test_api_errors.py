"""Every error: its status, the one JSON shape, and a text that names the field."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.errors import InternalError, Unavailable
from tests.doubles.toy_executor import ToyExecutor
from tests.server.toy_server import DEADLINE_S, INFO, MODEL, Served, read_events, serve, server_config

pytestmark = pytest.mark.slow

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PROMPT: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}


def error_of(response: Any) -> dict[str, Any]:
    """The error, whose shape is always the same."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@contextlib.asynccontextmanager
async def waiting_request(s: Served) -> AsyncIterator[None]:
    """A request that sits in the held engine's queue for the duration of the block."""
    task = asyncio.create_task(s.http.post(COMPLETION, json=PROMPT))
    await s.client.until("started")
    yield
    s.client.running.set()
    assert (await task).status_code == 200


CHAT_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "temperature: expected a number in 0..1000000, got 'hot'"),
    ({"temperature": True}, "temperature", "temperature: expected a number"),
    ({"top_p": 0}, "top_p", "top_p: expected a number in (0, 1], got 0"),
    ({"top_p": 1e-46}, "top_p", "top_p: expected a number in (0, 1], got 1e-46"),
    ({"temperature": 10**400}, "temperature", "got <an integer of 1329 bits>"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias", "logit_bias: expected a number in -100..100, got <an integer of"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "logit_bias: expected token ids as keys, got '999"),
    ({"top_k": 1.5}, "top_k", "top_k: expected an integer in -1..2147483647, got 1.5"),
    ({"n": 0}, "n", "n: expected an integer in 1..128, got 0"),
    ({"seed": -2}, "seed", "seed: expected an integer in 0.."),
    ({"stop": [""]}, "stop", "stop: expected a non-empty string or a list of them"),
    ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids: expected a list of token ids, got 5"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "stop_token_ids: expected token ids in 0..4095"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: expected token ids as keys"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias: expected a number in -100..100"),
    ({"min_tokens": 9}, "min_tokens", "min_tokens: expected at most max_tokens (4), got 9"),
    ({"ignore_eos": 1}, "ignore_eos", "ignore_eos: expected true or false, got 1"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: expected an integer in 1..2147483647, got 0"),
    ({"max_tokens": "4"}, "max_tokens", "max_tokens: expected an integer in 1..2147483647, got '4'"),
    ({"max_tokens": 600}, "max_tokens", "is 512 tokens (max_model_len) and"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: expected an integer in 1.."),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: expected only with logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: expected an integer in 0..20, got 21"),
    ({"temprature": 1}, "temprature", "temprature: unknown field (did you mean 'temperature'?)"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x: unknown field"),
    ({"messages": []}, "messages", "messages: expected at least one message"),
    ({"messages": "hi"}, "messages", "messages: expected a list, got 'hi'"),
    (
        {"messages": [{"role": "user"}]},
        "messages",
        "messages[0].content: expected text (only an assistant's may be null)",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content: expected text or a list of"),
    ({"messages": [{"role": "a b", "content": "x"}]}, "messages", "messages[0].role: expected one of system"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages", "messages[0].role: expected one of system"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role: expected a value, got none"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages",
        "messages[0].tool_calls: expected a function of the form",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "messages[0].content: expected text or a list of",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function: expected a function of the form"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format: expected an object with the type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        "response_format.json_schema.schema: expected what can be compiled, got: Unimplemented keys",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs: expected what can be compiled"),
    ({"guided_choice": ["a", 5]}, "guided_choice", "guided_choice[1]: expected a text of 1 character or more, got 5"),
    (
        {"guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
        "guided_choice: expected no other form than that of guided_regex",
    ),
    # Equal in Python, and another schema.
    (
        {"guided_json": {"const": 1}, "json_schema": {"const": True}},
        "json_schema",
        "json_schema: expected no other form",
    ),
    ({"json_schema": {"not": {}}}, "json_schema", "json_schema: expected what can be compiled, got: Unimplemented"),
    (
        {"response_format": {"type": "json_object", "schema": {"not": {}}}},
        "response_format",
        "response_format.schema: expected what can be compiled",
    ),
    (
        {"reasoning_max_tokens": 5, "thinking_token_budget": 6},
        "thinking_token_budget",
        "thinking_token_budget: expected",
    ),
    (
        {"thinking_token_budget": 5, "min_tokens": 1},
        "min_tokens",
        "min_tokens: expected 0 with thinking_token_budget",
    ),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "thinking_token_budget: not supported: "),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos: expected false with a grammar"),
    ({"audio": {"voice": "x"}}, "audio", "audio: not supported"),
    ({"chat_template": "{{ x }}"}, "chat_template", "chat_template: not supported"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "chat_template_kwargs: expected an object, got [1]"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "chat_template_kwargs: expected variables"),
    ({"thinking": {"type": "off"}}, "thinking", "thinking: expected true, false,"),
    ({"best_of": 2}, "best_of", "best_of: not supported: only the value of n (1) is, got 2"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens: not supported: only true is"),
    ({"n_predict": 5}, "n_predict", "n_predict: not supported: max_tokens says"),
    ({"": 1}, "", '"": unknown field'),
    ({"metadata": "x"}, "metadata", "metadata: expected an object, got 'x'"),
    ({"metadata": {"min_tokns": 1}}, "metadata", "metadata.min_tokns: unknown field (did you mean 'min_tokens'?)"),
    ({"metadata": {"min_tokens": -5}}, "min_tokens", "metadata.min_tokens: expected an integer in 0.."),
    ({"prompt_token_ids": [5]}, "prompt_token_ids", "prompt_token_ids: expected messages to be empty with it"),
    ({"messages": [], "prompt_token_ids": [4096]}, "prompt_token_ids", "prompt_token_ids: expected token ids in"),
    ({"messages": [], "prompt_token_ids": []}, "prompt_token_ids", "prompt_token_ids: expected at least one token"),
    ({"max_completion_tokens": 9999}, "max_completion_tokens", "max_completion_tokens: expected at most 4"),
    ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "min_tokens: expected at most max_tokens"),
    ({"request_id": "a b"}, "request_id", "request_id: expected"),
    ({"priority": 1 << 40}, "priority", "priority: expected an integer in -2147483648..2147483647"),
    ({"priority": 10**400}, "priority", "priority: expected an integer in"),
    ({"max_tokens": 10**400}, "max_tokens", "max_tokens: expected an integer in"),
]
COMPLETION_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "prompt: expected either prompt or prompt_token_ids, got neither"),
    ({"prompt_token_ids": [5]}, "prompt", "prompt: expected either prompt or prompt_token_ids, got both"),
    (
        {"prompt": None, "prompt_token_ids": ["x"]},
        "prompt_token_ids",
        "prompt_token_ids: expected token ids (integers), or a list of them",
    ),
    ({"prompt": []}, "prompt", "prompt: expected a string, token ids, or a list"),
    ({"prompt": ["x", 5]}, "prompt", "prompt: expected a string, token ids (integers), or a list of either"),
    ({"prompt": [5, True]}, "prompt", "prompt: expected a string, token ids (integers), or a list of either"),
    ({"prompt": [5, -1]}, "prompt", "prompt: expected token ids in 0..4095 (the vocabulary), got -1"),
    ({"prompt": None, "prompt_token_ids": []}, "prompt_token_ids", "prompt_token_ids: expected token ids, or a list"),
    ({"prompt": None, "prompt_token_ids": [-1]}, "prompt_token_ids", "prompt_token_ids: expected token ids in 0.."),
    ({"prompt": "x " * 600}, "prompt", "prompt is too long: expected at most 511 tokens, as this model's"),
    ({"best_of": 2}, "best_of", "best_of: not supported: only the value of n (1) is, got 2"),
    ({"suffix": "x"}, "suffix", "suffix: not supported"),
    ({"max_tokens": -2}, "max_tokens", "max_tokens: expected an integer in 0..2147483647, got -2"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "min_tokens: expected at most max_tokens (0), got 1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs: expected an integer in 0..20, got 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs: expected an integer in 0..20, got -1"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "prompt_logprobs: expected only without stream"),
    ({"logprobs": True}, "logprobs", "logprobs: expected an integer in 0..20, got true"),
    ({"messages": []}, "messages", "messages: unknown field"),
    ({"guided_choice": []}, "guided_choice", "guided_choice: expected a list of 1..4096 texts, got []"),
    ({"guided_grammar": ""}, "guided_grammar", "guided_grammar: expected text, got ''"),
    ({"guided_json": ""}, "guided_json", "guided_json: expected text, got ''"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice: expected a list of 1..4096 texts, got []"),
    ({"structured_outputs": {}}, "structured_outputs", "structured_outputs: expected exactly one of json,"),
    ({"guided_regex": "("}, "guided_regex", "guided_regex: expected what can be compiled, got: invalid regex"),
]


@pytest.fixture
async def served() -> Any:
    async with serve() as s:
        yield s


async def test_wrong_fields_are_named(served: Served) -> None:
    cases = [(CHAT, HELLO | c, p, m) for c, p, m in CHAT_CASES]
    cases += [(COMPLETION, PROMPT | c, p, m) for c, p, m in COMPLETION_CASES]
    for path, body, param, message in cases:
        response = await served.http.post(path, json=body)
        error = error_of(response)
        assert response.status_code == 400, (body, error)
        assert error["type"] == "invalid_request_error", error
        assert error["param"] == param, error
        assert message in error["message"], error
    assert served.client.submitted == [], "a refused request never reaches the engine"


LONG = "hello " * 600
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": LONG * 100}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>" * 600}]}, "messages"),
    (CHAT, HELLO | {"max_tokens": None, "max_completion_tokens": 600}, "max_completion_tokens"),
    (COMPLETION, {"prompt": LONG}, "prompt"),
    (COMPLETION, {"prompt": [[5], [5] * 600]}, "prompt"),
    (COMPLETION, {"prompt_token_ids": [5] * 600}, "prompt_token_ids"),
    (COMPLETION, PROMPT | {"max_tokens": 600}, "max_tokens"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 600}, "max_output_tokens"),
    ("/tokenize", {"prompt": LONG * 100}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG)
async def test_too_long_is_said_in_words_that_clients_look_for(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    """LiteLLM, LangChain and pydantic-ai compact a conversation, or ask another model, where they find these."""
    error = error_of(await served.http.post(path, json=body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "this model's maximum context length is 512 tokens" in error["message"]
    assert any(words in error["message"] for words in ("context_length_exceeded", "prompt is too long"))


@pytest.mark.parametrize(
    "field",
    ["user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"],
)
async def test_fields_that_cannot_matter_are_accepted(served: Served, field: str) -> None:
    assert (await served.http.post(CHAT, json=HELLO | {field: "x"})).status_code == 200


async def test_null_and_empty_values_ask_for_nothing(served: Served) -> None:
    nothing = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"],
               "temperature": None, "stop": None, "audio": None, "include_draft_logprobs": False,
               "seed": -1}  # fmt: skip
    assert (await served.http.post(CHAT, json=HELLO | nothing)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "x"', b"\xff\xfe", b"null", b"[]", b'"x"', b'{"prompt": "\\ud800"}',
     b"[" * 100_000, b'{"prompt":' + b"[" * 100_000, b'{"n": 1e999, "prompt": "x"}',
     b'{"seed": 1' + b"0" * 5000 + b', "prompt": "x"}', b'{"temperature": NaN, "prompt": "x"}'],
)  # fmt: skip
async def test_bodies_that_are_no_request(served: Served, body: bytes) -> None:
    response = await served.http.post(COMPLETION, content=body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_beyond_the_limit_is_413(is_chunked: bool) -> None:
    body = json.dumps(PROMPT | {"user": "x" * 2000}).encode()

    async def chunks() -> Any:
        for i in range(0, len(body), 100):
            yield body[i : i + 100]

    async with serve(server_config(ServerConfig(max_body_bytes=1000))) as s:
        response = await s.http.post(COMPLETION, content=chunks() if is_chunked else body)
        assert response.status_code == 413
        assert error_of(response)["message"] == "body: expected at most 1000 bytes, got more"
        assert (await s.http.post(COMPLETION, json=PROMPT)).status_code == 200


async def test_a_declared_length_beyond_the_limit_is_refused_unread() -> None:
    async with serve(server_config(ServerConfig(max_body_bytes=1000))) as s, asyncio.timeout(DEADLINE_S):
        host, port = s.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode())
        assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/models", 404, "route_not_found"),
        ("GET", "/health/", 404, "route_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1/responses/input_tokens", 404, "route_not_found"),
    ],
)
async def test_unknown_routes_methods_and_models(
    served: Served, method: str, path: str, status: int, code: str
) -> None:
    response = await served.http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("/openai/v1/completions/", "POST /v1/completions"),
        ("/v1/tokenize", "POST /tokenize"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/v1/audio/speech", None),
        ("/" + "x" * 9000, None),
    ],
)
async def test_an_unknown_route_names_the_one_that_was_meant(served: Served, path: str, near: str | None) -> None:
    message = error_of(await served.http.post(path, json=HELLO))["message"]
    question = "" if near is None else f": did you mean {near}?"
    sent = f"POST {path}"[:200]
    assert message == f"route: expected one of those that GET / lists, got {sent}{question}"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/completion", "of llama.cpp; here: POST /v1/completions"),
        ("/generate", "of SGLang; here: POST /v1/completions"),
    ],
)
async def test_a_route_of_another_server_names_ours(served: Served, path: str, hint: str) -> None:
    message = error_of(await served.http.post(path, json=HELLO))["message"]
    assert message == f"route: expected one of those that GET / lists, got POST {path} ({hint})"


async def test_unknown_model_is_404_for_generation(served: Served) -> None:
    response = await served.http.post(CHAT, json=HELLO | {"model": "other"})
    assert response.status_code == 404
    assert error_of(response) == {
        "message": f"model: expected '{MODEL}', got 'other'",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_api_keys_guard_everything_but_the_probes() -> None:
    async with serve(server_config(ServerConfig(api_key=("right", "other")))) as s:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}, {"Authorization": ""}):
            response = await s.http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["type"] == "authentication_error"
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/metrics", "/load", "/config-info", "/nowhere"):
            assert (await s.http.get(path)).status_code == 401
        for path in ("/health", "/ping", "/ready", "/live"):
            assert (await s.http.get(path)).status_code == 200
        assert (await s.http.get("/v1/models", headers={"x-api-key": "right"})).status_code == 200
        refused = await s.http.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert refused.json()["error"]["type"] == "authentication_error"
        for key in ("right", "other"):
            assert (await s.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        info = await s.http.get("/config-info", headers={"Authorization": "Bearer right"})
        assert "right" not in info.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(stream: bool) -> None:
    async with serve(server_config(max_num_queued_requests=1)) as s:
        s.client.running.clear()
        async with waiting_request(s):
            response = await s.http.post(COMPLETION, json=PROMPT | {"stream": stream})
            assert response.status_code == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert error_of(response)["type"] == "rate_limit_error"


async def test_a_job_with_more_sequences_than_the_queue_has_places_is_fed_to_it() -> None:
    async with serve(server_config(max_num_queued_requests=2)) as s:
        response = await s.http.post(COMPLETION, json={"prompt": [[5, 6]] * 40, "max_tokens": 2, "n": 2})
        assert response.status_code == 200
        assert [c["index"] for c in response.json()["choices"]] == [*range(80)]


async def test_a_job_is_429_while_others_fill_the_queue() -> None:
    async with serve(server_config(max_num_queued_requests=2)) as s:
        s.client.running.clear()
        async with waiting_request(s), waiting_request(s):
            while s.client.engine.stats().num_waiting < 2:
                await asyncio.sleep(0.001)
            assert (await s.http.post(COMPLETION, json=PROMPT | {"n": 5})).status_code == 429


async def test_sequences_that_nobody_could_ever_queue_are_refused_before_they_are_built() -> None:
    async with serve() as s:
        response = await s.http.post(COMPLETION, json={"prompt": ["a"] * 1024, "n": 128, "max_tokens": 1})
        assert response.status_code == 400
        assert error_of(response)["message"] == "n: expected at most 1024 sequences (prompts times n), got 131072"
        assert not s.client.submitted


async def test_more_logprobs_than_an_answer_may_have_are_refused(served: Served) -> None:
    body = {"prompt": [[5, 6]] * 1024, "max_tokens": 500, "logprobs": 20}
    response = await served.http.post(COMPLETION, json=body)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("logprobs: expected at most 4194304 of them")
    body = {"prompt": [[5] * 400] * 1024, "max_tokens": 0, "prompt_logprobs": 20}
    response = await served.http.post(COMPLETION, json=body)
    assert error_of(response)["message"].startswith("prompt_logprobs: expected at most 4194304 of them")


async def test_the_engine_failing_a_request_is_500() -> None:
    executor = ToyExecutor(INFO, failures={"bad": 0})
    async with serve(executor=executor) as s:
        response = await s.http.post(COMPLETION, json=PROMPT | {"request_id": "bad"})
        assert response.status_code == 500
        assert error_of(response)["type"] == "internal_error"
        assert (await s.http.post(COMPLETION, json=PROMPT)).status_code == 200


async def test_an_error_inside_a_stream_is_an_event_before_done() -> None:
    async with serve(executor=ToyExecutor(INFO, failures={"bad": 2})) as s:
        ask = PROMPT | {"request_id": "bad", "stream": True}
        async with s.http.stream("POST", COMPLETION, json=ask) as response:
            assert response.status_code == 200
            events = await read_events(response)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "internal_error"
    assert all("choices" in json.loads(e) for e in events[:-2])


@pytest.mark.parametrize("error", [Unavailable("the engine's process ended"), InternalError("broken")])
async def test_an_engine_that_dies_answers_who_waits(error: Any) -> None:
    async with serve() as s:
        s.client.running.clear()
        task = asyncio.create_task(s.http.post(COMPLETION, json=PROMPT))
        await s.client.until("started")
        await s.client.die(error)
        response = await task
        assert response.status_code == error.status
        assert error_of(response)["message"] == error.message
        for path in ("/health", "/ping", "/ready", "/load"):
            assert (await s.http.get(path)).status_code == 503
        assert (await s.http.get("/live")).status_code == 200
        assert "fastdeploy_sd:engine_silence_seconds" in (await s.http.get("/metrics")).text, "also then"
        assert (await s.http.post(COMPLETION, json=PROMPT)).status_code == 503


async def test_our_own_faults_are_500_without_detail(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as s:
        s.client.stats = None  # type: ignore[assignment, method-assign]
        response = await s.http.get("/load")
    assert response.status_code == 500
    assert error_of(response)["message"] == "the server failed on this request; its log says why"
    assert "GET /load failed" in caplog.text
