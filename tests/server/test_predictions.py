"""Predicted outputs over HTTP: the answer is the same, `usage` says what the prediction was worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server_process import ServerProcess, running_server
from tests.server.test_api import CHAT
from tests.server.toy_server import post, serve

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
ASK: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": f"Rename add to plus:\n{CODE}"}],
    "temperature": 0,
    "max_completion_tokens": 96,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--model", "demo", "--num-threads", "1") as running:
        yield running


@pytest.fixture
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def accepted_and_rejected(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_answers_are_the_same_and_usage_says_what_was_right(api: openai.OpenAI) -> None:
    plain = api.chat.completions.create(**ASK, extra_body={"speculation": {"enabled": False}})
    text = plain.choices[0].message.content
    assert text
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    half = text[: len(text) // 3] + "something else" + text[len(text) // 2 :]
    fields = {"speculation": {"method": "ngram", "num_speculative_tokens": 8}}
    for content, extra in ((text, None), (text, fields), (half, fields), ("nothing like it at all. " * 9, None)):
        parts: Any = [{"type": "text", "text": content[:40]}, {"type": "text", "text": content[40:]}]
        for given in (content, parts):
            answer = api.chat.completions.create(
                **ASK, prediction={"type": "content", "content": given}, extra_body=extra
            )
            assert answer.choices[0].message.content == text
            accepted, rejected = accepted_and_rejected(answer.usage)
            assert rejected >= 0
            assert answer.usage is not None
            num_tokens = answer.usage.completion_tokens
            assert accepted <= num_tokens
            if extra is not None:
                assert accepted > (0.5 if content == text else 0.2) * num_tokens
    silent = api.chat.completions.create(
        **ASK, prediction={"type": "content", "content": text}, extra_body={"speculation": {"enabled": False}}
    )
    assert accepted_and_rejected(silent.usage) == (0, 0)


def test_a_stream_with_choices_and_logprobs_ends_with_the_same_counts(api: openai.OpenAI) -> None:
    ask = ASK | {"n": 2, "logprobs": True, "extra_body": {"speculation": {"method": "ngram"}}}
    plain = api.chat.completions.create(**ask)
    text = plain.choices[0].message.content or ""
    stream = api.chat.completions.create(
        **ask, prediction={"type": "content", "content": text}, stream=True, stream_options={"include_usage": True}
    )
    shown, last = ["", ""], None
    for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            shown[choice.index] += choice.delta.content or ""
    assert shown == [text, text]
    assert last is not None
    accepted, _ = accepted_and_rejected(last.usage)
    assert last.usage is not None
    assert accepted > 0.5 * last.usage.completion_tokens


@pytest.mark.parametrize("method", ["auto", "ngram"])
def test_a_guided_answer_is_the_same(api: openai.OpenAI, method: str) -> None:
    """What the schema forces is drafted first, the prediction goes on behind it, and what it refuses is cut."""
    name = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"a_long_name": name}, "required": ["a_long_name"]}
    guided = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    ask: Any = ASK | {"response_format": guided, "extra_body": {"speculation": {"method": method}}}
    text = api.chat.completions.create(**ask).choices[0].message.content or ""
    assert text.startswith('{"a_long_name"')
    for content in (text, text.replace("long", "short"), "no JSON at all. " * 9):
        answer = api.chat.completions.create(**ask, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == text


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "content"}, {"type": "text", "content": "a"}, {"type": "content", "content": 3},
        {"type": "content", "content": [{"type": "image_url"}]}, {"type": "content", "content": "a", "more": 1},
    ],
)  # fmt: skip
def test_what_is_no_prediction_is_refused(api: openai.OpenAI, prediction: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction: expected"):
        api.chat.completions.create(**ASK, prediction=prediction)


def test_one_longer_than_the_context_is_refused(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction: expected at most") as error:
        api.chat.completions.create(**ASK, prediction={"type": "content", "content": "one more word, " * 4000})
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "prediction"


async def test_a_server_that_decodes_plainly_takes_it_and_counts_nothing() -> None:
    ask = {"prompt_token_ids": [5, 6, 7], "max_tokens": 6, "temperature": 0}
    async with serve() as s:
        plain = await post(s, CHAT, ask)
        answer = await post(s, CHAT, ask | {"prediction": {"type": "content", "content": "hello"}})
    assert answer["choices"] == plain["choices"]
    counts = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == counts
