"""A real server whose model thinks: limits of the thinking hold to the token, whatever is drafted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import fastdeploy_sd
from fastdeploy_sd import LLM, SamplingParams
from tests.server.test_api_e2e import RunningServer

pytestmark = pytest.mark.slow

DEMO = Path(fastdeploy_sd.__file__).parent / "demo_model"
OPENING, CLOSING = 3, 0  # tokens that the demo model has no other use for
PROMPT = {"messages": [{"role": "user", "content": "Once upon a time, in a land far away, there was a king."}]}
LIMITS: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module", params=["shown", "hidden"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model, to which two tokens are marks; the template opens the thinking unless told not to."""
    directory = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(DEMO, directory)
    spec = json.loads((directory / "tokenizer.json").read_text())
    for token_id, mark in ((OPENING, "<think>"), (CLOSING, "</think>")):
        old = spec["added_tokens"][token_id]["content"]
        spec["added_tokens"][token_id] |= {"content": mark, "special": request.param == "hidden"}
        spec["model"]["vocab"][mark] = spec["model"]["vocab"].pop(old)
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with (directory / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{# </think> #}")
    return str(directory)


@pytest.fixture(scope="module")
def url(model: str) -> Iterator[str]:
    """A server of it."""
    options = {"model": model, "speculative-config": '{"method": "ngram", "num_speculative_tokens": 5}'}
    server = RunningServer("thinking", options)
    try:
        yield server.url
    finally:
        assert server.stop() == 0


def chat(url: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json=PROMPT | LIMITS | fields, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def test_offline_it_is_the_same(url: str, model: str) -> None:
    """Guided answers begin behind the thinking there, too."""
    choice = {"choice": ["yes", "not at all"]}
    with LLM(model, dtype="float32", num_gpu_blocks_override=128) as llm:
        for asked, bias in ((None, 0.0), (choice, 100.0)):
            params = SamplingParams(temperature=0, max_tokens=60, logit_bias={CLOSING: bias})
            [output] = llm.chat(PROMPT["messages"], params, structured_outputs=asked, use_tqdm=False)
            expected = message_of(chat(url, logit_bias={str(CLOSING): bias}, structured_outputs=asked))
            [message] = output.messages
            assert list(output.outputs[0].token_ids) == expected["completion_token_ids"]
            assert (message.content, message.reasoning) == (expected["content"], expected.get("reasoning_content", ""))
            assert (message.content in choice["choice"]) == (asked is not None) == (not message.reasoning)
            assert message.as_turn().get("reasoning_content") == expected.get("reasoning_content")


def test_thinking_ends_at_its_limit_with_the_tokens_of_plain_decoding(url: str) -> None:
    for limit in (0, 1, 11):
        answer = chat(url, reasoning_max_tokens=limit)
        message = message_of(answer)
        num_thought = message["completion_token_ids"].index(CLOSING)
        assert num_thought <= limit
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thought + 1
        assert message["content"]
        assert bool(message.get("reasoning_content")) == (num_thought > 0)
        assert message_of(chat(url, reasoning_max_tokens=limit, speculation={"enabled": False})) == message
    free = message_of(chat(url))
    assert free["completion_token_ids"][:11] == message["completion_token_ids"][:11], "the limit changes nothing before"


def test_a_guided_answer_begins_behind_the_thinking(url: str) -> None:
    schema = {"type": "object", "properties": {"king": {"enum": ["Arthur", "Olaf"]}}, "required": ["king"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    for limit in ({}, {"reasoning_max_tokens": 6}):
        answer = message_of(chat(url, response_format=form, logit_bias={str(CLOSING): 2}, **limit))
        assert message_of(chat(url, response_format=form, logit_bias={str(CLOSING): 2}, speculation={"enabled": False},
                               **limit)) == answer  # fmt: skip
        if limit or answer["finish_reason"] == "stop":
            assert answer["reasoning_content"]
            assert json.loads(answer["content"])["king"] in ("Arthur", "Olaf")


def test_a_stream_has_the_same_parts(url: str) -> None:
    whole = message_of(chat(url, reasoning_max_tokens=9))
    body = PROMPT | LIMITS | {"reasoning_max_tokens": 9, "stream": True}
    text = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]


def test_a_model_that_may_think_by_itself_is_limited_too(url: str) -> None:
    answer = message_of(chat(url, enable_thinking=False, reasoning_max_tokens=4, logit_bias={str(OPENING): 100}))
    tokens = answer["completion_token_ids"]
    assert tokens[0] == OPENING
    assert tokens.index(CLOSING) == 5


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"reasoning_max_tokens": -1}, "expected an integer in 0.."),
        ({"reasoning_max_tokens": 5, "ignore_eos": True}, "ignore_eos: expected false"),
        ({"reasoning_max_tokens": 5, "min_tokens": 3}, "min_tokens: expected 0"),
    ],
)
def test_wrong_limits_are_named(url: str, fields: dict[str, Any], word: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json=PROMPT | fields, timeout=120)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]
