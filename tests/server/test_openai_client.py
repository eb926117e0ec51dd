"""The real `openai` package against the server: answers, streams, and errors of the right class."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from fastdeploy_sd.config import ServerConfig
from tests.server.toy_server import MODEL, TOKENIZER, serve, server_config, text_of, toy_tokens

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
CHAT_PROMPT = TOKENIZER.encode(
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    add_special_tokens=False,
)


async def test_chat_completion() -> None:
    async with serve() as s:
        answer = await s.api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=8)
    expected = toy_tokens(CHAT_PROMPT, 8)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(expected)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT_PROMPT), 8)
    assert answer.usage.total_tokens == len(CHAT_PROMPT) + 8


async def test_chat_stream_adds_up_to_the_whole_answer() -> None:
    async with serve() as s:
        stream = await s.api.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=8, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text_of(toy_tokens(CHAT_PROMPT, 8))
    assert chunks[0].choices[0].delta.to_dict() == {"role": "assistant", "content": ""}
    assert chunks[-2].choices[0].delta.to_dict() == {}
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def test_completion_with_several_prompts_and_choices() -> None:
    prompts = ["first", "the second one"]
    ids = [TOKENIZER.encode(p, add_special_tokens=True) for p in prompts]
    async with serve() as s:
        answer = await s.api.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=5, n=2)
        by_ids = await s.api.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=5, n=2)
    texts = [text_of(toy_tokens(p, 5)) for p in ids for _ in range(2)]
    assert [c.text for c in answer.choices] == texts == [c.text for c in by_ids.choices]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(p) for p in ids), "a prompt counts once"
    assert answer.usage.completion_tokens == 20


async def test_completion_stream_of_several_choices_adds_up() -> None:
    prompt = TOKENIZER.encode("x", add_special_tokens=True)
    async with serve() as s:
        stream = await s.api.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=6, n=3, stream=True, echo=True
        )
        texts, reasons = ["", "", ""], []
        async for chunk in stream:
            [choice] = chunk.choices
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["x" + text_of(toy_tokens(prompt, 6))] * 3
    assert reasons == ["length"] * 3


async def test_seed_makes_an_answer_repeatable_and_each_choice_different() -> None:
    async with serve() as s:
        ask: Any = {"model": MODEL, "prompt": "x", "max_tokens": 6, "seed": 5, "n": 2}
        first, again = [await s.api.completions.create(**ask) for _ in range(2)]
        shifted = await s.api.completions.create(**ask | {"seed": 6, "n": 1})
        unseeded = [await s.api.completions.create(model=MODEL, prompt="x", max_tokens=6) for _ in range(2)]
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert first.choices[0].text != first.choices[1].text
    assert shifted.choices[0].text == first.choices[1].text, "choice i uses seed + i"
    assert unseeded[0].choices[0].text != unseeded[1].choices[0].text


async def test_chat_logprobs() -> None:
    expected = toy_tokens(CHAT_PROMPT, 4)
    async with serve() as s:
        answer = await s.api.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [bytes(entry.bytes or []) for entry in logprobs.content] == [TOKENIZER.token_bytes(i) for i in expected]
    assert [entry.logprob for entry in logprobs.content] == [-(1.0 + i % 7) for i in expected]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 4


async def test_completion_logprobs() -> None:
    prompt = TOKENIZER.encode("x", add_special_tokens=True)
    async with serve() as s:
        answer = await s.api.completions.create(model=MODEL, prompt="x", temperature=0, max_tokens=4, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-(1.0 + i % 7) for i in toy_tokens(prompt, 4)]
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.top_logprobs is not None
    assert all(3 <= len(best) <= 4 for best in logprobs.top_logprobs)


async def test_stop_string_ends_text_tokens_and_the_engines_request() -> None:
    prompt = TOKENIZER.encode("x", add_special_tokens=True)
    tokens = toy_tokens(prompt, 40)
    stop = text_of(tokens[10:13])
    async with serve() as s:
        answer = await s.api.completions.create(model=MODEL, prompt="x", temperature=0, max_tokens=200, stop=stop)
        await s.client.until("idle")
    text = text_of(tokens)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 13


async def test_models() -> None:
    async with serve() as s:
        models = await s.api.models.list()
        assert [m.id for m in models.data] == [MODEL]
        assert (await s.api.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
        ({"max_tokens": 10_000}, openai.BadRequestError),
    ],
)
async def test_errors_have_the_classes_of_the_package(change: dict[str, Any], error: type[Exception]) -> None:
    async with serve() as s:
        ask: Any = {"model": MODEL, "messages": MESSAGES} | change
        with pytest.raises(error):
            await s.api.chat.completions.create(**ask)


async def test_wrong_api_key() -> None:
    async with serve(server_config(ServerConfig(api_key=("right", "other")))) as s:
        assert (await s.api.models.list()).data
        with pytest.raises(openai.AuthenticationError):
            await s.api.with_options(api_key="wrong").models.list()
