"""What the routes do beyond OpenAI's core: FastDeploy's extensions, server information, clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.entrypoints.openai.protocol import Body, ChatCompletionBody, CompletionBody
from fastdeploy_sd.entrypoints.openai.protocol.fields import Only
from tests.doubles.toy_executor import ToyExecutor
from tests.server.toy_server import (
    DEADLINE_S,
    INFO,
    MODEL,
    TOKENIZER,
    Served,
    post,
    read_events,
    serve,
    server_config,
    text_of,
    toy_tokens,
)

pytestmark = pytest.mark.slow

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
PROMPT: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture
async def served() -> Any:
    async with serve() as s:
        yield s


async def post_stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a successful stream."""
    async with served.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = await read_events(response)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


# ---- extensions -----------------------------------------------------------------------------------------------------


async def test_token_ids_in_and_out(served: Served) -> None:
    prompt = [5, 6, 7]
    expected = toy_tokens(prompt, 4)
    ask = {"prompt_token_ids": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = await post(served, CHAT, ask)
    [choice] = answer["choices"]
    message = choice["message"]
    assert (message["prompt_token_ids"], message["completion_token_ids"]) == (prompt, expected)
    assert (answer["prompt_token_ids"], choice["token_ids"]) == (prompt, expected), "vLLM's places"
    choice = (await post(served, COMPLETION, ask))["choices"][0]
    assert (choice["prompt_token_ids"], choice["completion_token_ids"]) == (prompt, expected)
    assert choice["token_ids"] == expected
    chunks = await post_stream(served, CHAT, ask)
    assert [c.get("prompt_token_ids") for c in chunks] == [prompt] + [None] * (len(chunks) - 1)
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", ())] == expected
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0]["prompt_token_ids"] == prompt
    assert [i for d in deltas for i in d.get("completion_token_ids", ())] == expected
    choices = [c["choices"][0] for c in await post_stream(served, COMPLETION, ask)]
    assert choices[0]["prompt_token_ids"] == prompt
    assert [i for c in choices for i in c["completion_token_ids"]] == expected
    assert [i for c in choices for i in c["token_ids"]] == expected


async def test_a_server_may_force_usage_on_streams() -> None:
    async with serve(server_config(ServerConfig(enable_force_include_usage=True))) as s:
        for path, ask in ((COMPLETION, PROMPT), (CHAT, HELLO | {"stream_options": {"include_usage": False}})):
            *chunks, last = await post_stream(s, path, ask)
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 4
            assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_request_without_max_tokens_gets_what_the_kv_cache_holds() -> None:
    """The cache is smaller than the context, as that of most models is; every limit shown is the one that counts."""
    info = replace(INFO, num_blocks=8)
    limit = 8 * info.block_size + 1
    async with serve(executor=ToyExecutor(info)) as served:
        for path, ask in ((COMPLETION, PROMPT), (CHAT, HELLO)):
            body = {key: value for key, value in ask.items() if key != "max_tokens"} | {"ignore_eos": True}
            usage = (await post(served, path, body))["usage"]
            assert usage["total_tokens"] == limit
        [model] = (await served.http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == limit
        refused = await served.http.post(COMPLETION, json={"prompt": [5, 6], "max_tokens": limit - 1})
        assert refused.status_code == 400
        expected = (
            f"max_tokens: expected at most {limit - 2}, as this model's maximum context length is {limit} tokens"
            f" (what the KV cache holds) and the prompt has 2, got {limit - 1} (context_length_exceeded)"
        )
        assert refused.json()["error"]["message"] == expected


async def test_disable_chat_template_takes_the_message_as_raw_prompt(served: Served) -> None:
    raw = "<|im_start|>user\nhi<|im_end|>"
    ask = HELLO | {"messages": [{"role": "user", "content": raw}], "disable_chat_template": True}
    prompt = TOKENIZER.encode(raw, add_special_tokens=True)
    answer = await post(served, CHAT, ask | {"return_token_ids": True})
    assert answer["choices"][0]["message"]["prompt_token_ids"] == prompt
    assert 1 in prompt, "control tokens act in a raw prompt"


async def test_control_tokens_in_chat_content_are_text(served: Served) -> None:
    ask = HELLO | {"messages": [{"role": "user", "content": "a<|im_end|>b"}], "return_token_ids": True}
    prompt = (await post(served, CHAT, ask))["choices"][0]["message"]["prompt_token_ids"]
    assert prompt.count(2) == 1, "the template's own"


async def test_text_parts_are_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asks = [HELLO | {"messages": [{"role": "user", "content": c}], "return_token_ids": True} for c in (parts, "a\nb")]
    first, second = [(await post(served, CHAT, a))["choices"][0]["message"]["prompt_token_ids"] for a in asks]
    assert first == second


async def test_request_id_names_the_response_and_the_engines_requests(served: Served) -> None:
    answer = await post(served, COMPLETION, PROMPT | {"request_id": "mine", "n": 2, "prompt": ["a", "b"]})
    assert answer["id"] == "mine"
    assert [r.request_id for r in served.client.submitted] == ["mine-0-0", "mine-0-1", "mine-1-0", "mine-1-1"]


async def test_scheduling_and_sampling_fields_reach_the_engine(served: Served) -> None:
    sampling = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [9],
                "bad_words": ["foo"], "ignore_eos": True, "logit_bias": {"7": -100}, "top_p": 0.5,
                "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11}  # fmt: skip
    await post(served, CHAT, HELLO | sampling | {"priority": -3, "cache_salt": "tenant"})
    [request] = served.client.submitted
    assert (request.priority, request.cache_salt, request.seed, request.max_tokens) == (-3, "tenant", 11, 4)
    expected = sampling | {"stop_token_ids": (9,), "bad_words": ("foo",), "logit_bias": {7: -100.0}}
    assert {name: getattr(request.sampling, name) for name in sampling} == expected
    assert len(request.bad_words_token_ids) == 2


async def test_max_tokens_defaults_to_the_rest_of_the_context(served: Served) -> None:
    served.client.running.clear()
    task = asyncio.create_task(served.http.post(COMPLETION, json={"prompt": [5, 6, 7]}))
    await served.client.until("started")
    assert served.client.submitted[0].max_tokens == 512 - 3
    served.client.running.set()
    assert (await task).json()["choices"][0]["finish_reason"] in ("length", "stop")


async def test_metrics_on_request(served: Served) -> None:
    ask = PROMPT | {"collect_metrics": True}
    metrics = (await post(served, COMPLETION, ask))["choices"][0]["metrics"]
    assert metrics["arrival_time"] <= metrics["first_token_time"] <= metrics["finished_time"]
    chunks = await post_stream(served, COMPLETION, ask)
    assert "metrics" in chunks[-1]["choices"][0]
    assert "metrics" not in (await post(served, COMPLETION, PROMPT))["choices"][0]


async def test_stop_reason_tells_a_stop_string_from_a_stop_token(served: Served) -> None:
    tokens = toy_tokens(TOKENIZER.encode("hello", add_special_tokens=True), 8)
    ask = PROMPT | {"max_tokens": 50}
    by_token = (await post(served, COMPLETION, ask | {"stop_token_ids": [tokens[3]]}))["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", tokens[3])
    assert by_token["text"] == text_of(tokens[:3])
    stop = text_of(tokens[4:6])
    by_string = (await post(served, COMPLETION, ask | {"stop": stop}))["choices"][0]
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", stop)
    kept = (await post(served, COMPLETION, ask | {"stop": stop, "include_stop_str_in_output": True}))["choices"][0]
    assert kept["text"] == by_string["text"] + stop
    streamed = await post_stream(served, COMPLETION, ask | {"stop": stop})
    assert "".join(c["choices"][0]["text"] for c in streamed) == by_string["text"]


async def test_a_stop_string_counts_as_a_stop_and_a_reader_that_leaves_as_an_abort(served: Served) -> None:
    tokens = toy_tokens(TOKENIZER.encode("hello", add_special_tokens=True), 8)
    ask = PROMPT | {"max_tokens": 50, "stop": text_of(tokens[4:6])}
    for body in (ask, ask | {"collect_metrics": True}):
        await post(served, COMPLETION, body)
        await post_stream(served, COMPLETION, body)
    await served.client.until("idle")
    async with served.http.stream("POST", COMPLETION, json=PROMPT | {"max_tokens": 400, "stream": True}):
        await served.client.until("started")
    await served.client.until("idle")
    text = (await served.http.get("/metrics")).text
    for line in ('requests_finished_total{reason="stop"} 4.0', 'requests_finished_total{reason="abort"} 1.0'):
        assert f"fastdeploy_sd:{line}" in text
    assert "fastdeploy:request_success_total 4.0" in text


async def test_continuous_usage_grows_to_the_final_one(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await post_stream(served, CHAT, HELLO | {"stream_options": options})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_echo_puts_the_prompt_first_also_for_token_ids(served: Served) -> None:
    assert (await post(served, COMPLETION, PROMPT | {"echo": True}))["choices"][0]["text"].startswith("hello")
    ids = TOKENIZER.encode("<|im_start|>hey", add_special_tokens=False)
    answer = await post(served, COMPLETION, PROMPT | {"echo": True, "prompt": ids})
    assert answer["choices"][0]["text"].startswith("<|im_start|>hey")


async def test_a_shared_prompt_counts_its_cached_tokens(served: Served) -> None:
    ask = PROMPT | {"prompt": [5] * 64}
    first, second = [await post(served, COMPLETION, ask) for _ in range(2)]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert first["choices"] == second["choices"]


async def test_texts_become_tokens_and_tokens_texts(served: Served) -> None:
    text = "Zürich <|im_end|>"
    answer = await post(served, "/tokenize", {"prompt": text, "return_token_strs": True})
    expected = TOKENIZER.encode(text, add_special_tokens=True)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (expected, len(expected), 512)
    assert "".join(answer["token_strs"]).endswith("rich <|im_end|>")
    assert (await post(served, "/detokenize", {"tokens": expected}))["prompt"] == text
    conversation = HELLO["messages"]
    tokens = (await post(served, "/tokenize", {"messages": conversation}))["tokens"]
    message = (await post(served, CHAT, HELLO | {"return_token_ids": True}))["choices"][0]["message"]
    assert tokens == message["prompt_token_ids"], "what /tokenize counts is what a chat completion costs"
    for path, body, told in (
        (
            "/tokenize",
            {"prompt": "x", "messages": conversation},
            "prompt: expected either prompt or messages, got both",
        ),
        ("/detokenize", {"tokens": [4096]}, "tokens: expected token ids in 0..4095"),
        ("/detokenize", {"tokens": None}, "tokens: expected token ids"),
        ("/detokenize", {}, "tokens: expected a value, got none"),
    ):
        refused = await served.http.post(path, json=body)
        assert refused.status_code == 400
        assert told in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "least", "body_type"), [(CHAT, HELLO, ChatCompletionBody), (COMPLETION, PROMPT, CompletionBody)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_ask_for_nothing_change_no_byte(
    served: Served, path: str, least: dict[str, Any], body_type: type[Body], stream: bool
) -> None:
    """Every field of other servers at once, with each neutral value: the answer is the same but for the time."""
    kinds = {name: [k for k in f.metadata if isinstance(k, Only)] for name, f in body_type.model_fields.items()}
    allowed = {name: found[0].schema["enum"] for name, found in kinds.items() if found}
    ask = least | {"request_id": "same", "temperature": 1, "seed": 3, "stream": stream, "max_tokens": 12}
    answers = []
    for i in range(-1, max(map(len, allowed.values()))):
        neutral = {name: values[i % len(values)] for name, values in allowed.items()} if i >= 0 else {}
        response = await served.http.post(path, json=ask | neutral)
        assert response.status_code == 200, response.text
        answers.append(re.sub(r'"created":[0-9]+', "", response.text))
    assert set(answers) == {answers[0]}


# ---- the server about itself ----------------------------------------------------------------------------------------


async def test_information_routes(served: Served) -> None:
    get = served.http.get
    assert (await get("/health")).status_code == 200
    assert (await get("/ping")).status_code == (await served.http.post("/ping")).status_code == 200
    assert (await get("/ready")).status_code == (await get("/live")).status_code == 200
    card = (await get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (MODEL, 512)
    load = (await get("/load")).json()
    assert (load["num_requests_running"], load["num_requests_waiting"], load["num_tokens_waiting"]) == (0, 0, 0)
    info = (await get("/config-info")).json()
    assert info["served_model_name"]["value"] == [MODEL]
    metrics = await get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "fastdeploy:num_requests_running 0.0" in metrics.text


async def test_a_model_of_several_names() -> None:
    config = server_config()
    async with serve(replace(config, model=replace(config.model, served_model_name=("first", "second", "first")))) as s:
        assert [card["id"] for card in (await s.http.get("/v1/models")).json()["data"]] == ["first", "second"]
        assert (await s.http.get("/v1/models/second")).json()["id"] == "second"
        for asked, name in ((None, "first"), ("", "first"), ("default", "first"), ("null", "first"),
                            ("first", "first"), ("second", "second")):  # fmt: skip
            assert (await post(s, COMPLETION, PROMPT | {"model": asked}))["model"] == name
        refused = await s.http.post(COMPLETION, json=PROMPT | {"model": "third"})
        assert refused.json()["error"]["message"] == "model: expected one of 'first', 'second', got 'third'"


# ---- clients that leave or dawdle -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [PROMPT, PROMPT | {"stream": True}, PROMPT | {"n": 3}, PROMPT | {"n": 3, "stream": True}]
)
async def test_a_client_that_leaves_before_the_first_token_frees_its_requests(
    served: Served, body: dict[str, Any]
) -> None:
    served.client.running.clear()
    task = asyncio.create_task(served.http.post(COMPLETION, json=body))
    await served.client.until("started")
    task.cancel()
    await served.client.until("idle")
    assert len(served.client.aborted) == body.get("n", 1)


async def test_a_client_that_leaves_a_stream_frees_its_requests(served: Served) -> None:
    ask = {"prompt": "x", "stream": True, "n": 2, "ignore_eos": True}
    async with served.http.stream("POST", COMPLETION, json=ask) as response:
        async for _ in response.aiter_lines():
            served.client.running.clear()  # the engine stands still: only the disconnect can end the requests
            break
    await served.client.until("idle")
    assert len(served.client.aborted) == 2


async def test_a_reader_that_dawdles_does_not_delay_others(served: Served) -> None:
    slow = {"prompt": "x", "stream": True, "ignore_eos": True, "logprobs": 5}
    async with served.http.stream("POST", COMPLETION, json=slow), asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(post(served, COMPLETION, PROMPT) for _ in range(4)))
    assert len({a["choices"][0]["text"] for a in answers}) == 1


@pytest.mark.fast
async def test_many_requests_at_once_get_what_they_get_alone(served: Served) -> None:
    prompts = [[5 + i, 6, 7] for i in range(12)]
    asks = [{"prompt": p, "max_tokens": 6, "temperature": 0, "return_token_ids": True} for p in prompts]
    answers = await asyncio.gather(*(post(served, COMPLETION, a) for a in asks))
    assert [a["choices"][0]["completion_token_ids"] for a in answers] == [toy_tokens(p, 6) for p in prompts]


async def test_an_answer_that_was_begun_goes_on_with_the_tokens_of_its_prompt(served: Served) -> None:
    begun = {
        "messages": [HELLO["messages"][0], {"role": "assistant", "content": "so it"}],
        "continue_final_message": True,
    }
    prompt = (await post(served, "/tokenize", begun))["tokens"]
    assert TOKENIZER.decode(prompt, skip_hidden=False).endswith("assistant\nso it")
    asked: dict[str, Any] = {"max_tokens": 9, "temperature": 0}
    plain = (await post(served, COMPLETION, asked | {"prompt": prompt}))["choices"][0]["text"]
    chat = await post(served, CHAT, asked | begun | {"n": 2, "seed": 1})
    assert [choice["message"]["content"] for choice in chat["choices"]] == [plain, plain]
    chunks = await post_stream(served, CHAT, asked | begun)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == plain
