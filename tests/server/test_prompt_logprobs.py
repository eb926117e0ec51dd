"""Log-probabilities of prompts over HTTP: OpenAI's `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.doubles.toy_logprobs import toy_logprob
from tests.server.toy_server import TOKENIZER, Served, post, read_events, serve

pytestmark = pytest.mark.slow

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXT = "def f(x):\n    return x"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
ECHO: dict[str, Any] = {"prompt": IDS, "echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0}


@pytest.fixture
async def served() -> Any:
    async with serve() as s:
        yield s


def label(token_id: int) -> str:
    return TOKENIZER.decode([token_id], skip_hidden=False)


async def test_echo_without_output_scores_the_prompt(served: Served) -> None:
    """What lm-eval and OpenAI's older harnesses send."""
    answer = await post(served, COMPLETION, ECHO)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert logprobs["tokens"] == [label(i) for i in IDS]
    assert logprobs["token_logprobs"] == [None, *(toy_logprob(i) for i in IDS[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert all(at[label(i)] == toy_logprob(i) for at, i in zip(logprobs["top_logprobs"][1:], IDS[1:], strict=True))
    assert [TEXT[offset:].startswith(label(i)) for offset, i in zip(logprobs["text_offset"], IDS, strict=True)]
    assert logprobs["text_offset"] == [len(TOKENIZER.decode(IDS[:n], skip_hidden=False)) for n in range(len(IDS))]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), 0)


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "hello"], IDS, [IDS, IDS[:1]]], ids=["text", "texts", "ids", "lists"])
async def test_every_kind_of_prompt(served: Served, prompt: Any) -> None:
    answer = await post(served, COMPLETION, ECHO | {"prompt": prompt, "max_tokens": 2})
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert lengths == {len(logprobs["tokens"])}
        assert "".join(logprobs["tokens"]).endswith(choice["text"])
        begins = [choice["text"][offset:] for offset in logprobs["text_offset"][-3:]]
        assert all(map(str.startswith, begins, logprobs["tokens"][-3:]))
    assert answer["usage"]["completion_tokens"] == 2 * len(answer["choices"])


async def test_a_control_token_in_the_prompt_has_its_place(served: Served) -> None:
    text = "hey<|im_start|>you"
    [choice] = (await post(served, COMPLETION, ECHO | {"prompt": text}))["choices"]
    logprobs = choice["logprobs"]
    place = logprobs["tokens"].index("<|im_start|>")
    assert [text[logprobs["text_offset"][i] :][:3] for i in (place, place + 1)] == ["<|i", "you"]


async def test_a_stream_begins_with_the_prompt(served: Served) -> None:
    for max_tokens in (0, 3):
        body = ECHO | {"max_tokens": max_tokens}
        [whole] = (await post(served, COMPLETION, body))["choices"]
        async with served.http.stream("POST", COMPLETION, json=body | {"stream": True}) as response:
            events = await read_events(response)
        chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
        for name, entries in whole["logprobs"].items():
            assert [entry for part in parts for entry in part[name]] == entries, name
        assert len(parts[0]["tokens"]) >= len(IDS), "the first chunk has the prompt"


async def test_prompt_logprobs_are_in_the_form_of_vllm(served: Served) -> None:
    ask = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    in_choice = (await post(served, COMPLETION, ask | {"prompt": IDS}))["choices"][0]["prompt_logprobs"]
    next_to_choices = (await post(served, CHAT, ask | {"messages": [], "prompt_token_ids": IDS}))["prompt_logprobs"]
    assert in_choice == next_to_choices
    assert in_choice[0] is None
    assert len(in_choice) == len(IDS)
    for token_id, at in zip(IDS[1:], in_choice[1:], strict=True):
        own = {"logprob": toy_logprob(token_id), "rank": 1, "decoded_token": label(token_id)}
        other = {"logprob": toy_logprob(token_id) - 1, "rank": 2, "decoded_token": label(token_id + 1)}
        assert at == {str(token_id): own, str(token_id + 1): other}
    with_echo = ECHO | {"prompt_logprobs": 0}
    [choice] = (await post(served, COMPLETION, with_echo))["choices"]
    assert all(len(at) == 1 for at in choice["prompt_logprobs"][1:])
    assert all(len(at) == 2 for at in choice["logprobs"]["top_logprobs"][1:])
