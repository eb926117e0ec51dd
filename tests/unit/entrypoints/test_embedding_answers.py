"""Embeddings over an engine with made-up hidden rows: OpenAI's and Ollama's forms, lengths, limits and errors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.types import Pooling
from tests.unit.entrypoints.scripted_app import ScriptedApp, hidden_row

OPENAI, OLLAMA, OLDER = "/v1/embeddings", "/api/embed", "/api/embeddings"
APP = ScriptedApp()


def post(path: str, **body: Any) -> dict[str, Any]:
    response = APP.post(path, {"model": "m"} | body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def expected(dimensions: int | None = None) -> list[list[float]]:
    """Those of the requests that came, of length 1."""
    rows = [hidden_row(request)[:dimensions].astype(np.float64) for request in APP.client.submitted]
    return [(row / np.linalg.norm(row)).astype(np.float32).tolist() for row in rows]


def vectors(answer: dict[str, Any]) -> list[Any]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


@pytest.mark.parametrize("texts", ["hello", ["hello", "a longer text"], [5, 6, 7], [[5, 6], [7]]])
def test_every_kind_of_input(texts: Any) -> None:
    answer = post(OPENAI, input=texts)
    assert vectors(answer) == expected()
    assert len(APP.client.submitted) == (2 if isinstance(texts, list) and len(texts) == 2 else 1)
    num_tokens = sum(len(request.prompt_token_ids) for request in APP.client.submitted)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "m")
    for request in APP.client.submitted:
        assert (request.sampling.max_tokens, request.speculation.enabled, request.pooling) == (0, False, Pooling.MEAN)


def test_forms_and_lengths() -> None:
    assert vectors(post(OPENAI, input="hello", dimensions=2)) == expected(2)
    assert vectors(post(OPENAI, input=[5, 9], pooling="last")) == expected()
    assert APP.client.submitted[0].pooling is Pooling.LAST
    [encoded] = vectors(post(OPENAI, input="hello", encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == expected()[0]
    assert vectors(post(OPENAI, input="hello", encoding_format="float", user="u")) == expected()


def test_ollamas_forms() -> None:
    answer = post(OLLAMA, input=["hello", "more"], keep_alive="5m", options={"num_ctx": 2048})
    assert answer["embeddings"] == expected()
    num_tokens = sum(len(request.prompt_token_ids) for request in APP.client.submitted)
    assert (answer["model"], answer["prompt_eval_count"], answer["total_duration"]) == ("m", num_tokens, 3_000_000_000)
    assert post(OLLAMA, input="hello", dimensions=2)["embeddings"] == expected(2)
    assert post(OLDER, prompt="hello") == {"embedding": expected()[0]}


def test_ollama_cuts_what_is_too_long() -> None:
    long = "word " * 2000
    post(OLLAMA, input=long)
    assert len(APP.client.submitted[0].prompt_token_ids) == APP.client.model_info.max_request_tokens - 1
    post(OLLAMA, input=long, options={"num_ctx": 9})
    assert len(APP.client.submitted[0].prompt_token_ids) == 9
    refused = APP.post(OLLAMA, {"input": long, "truncate": False})
    assert refused.status_code == 400
    assert refused.json()["code"] == "context_length_exceeded"
    assert APP.post(OPENAI, {"input": long}).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({}, "input: expected a value, got none"),
        ({"input": []}, "input: expected a string, token ids, or a list of 1..1024 of either, got []"),
        ({"input": [1 << 40]}, "input: "),
        ({"input": "x", "dimensions": 5}, "dimensions: expected at most the 4 of the model, got 5"),
        ({"input": "x", "dimensions": 0}, "dimensions: expected an integer in 1..2147483647, got 0"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format: expected one of float, base64, got 'int8'"),
        ({"input": "x", "pooling": "cls"}, "pooling: expected one of mean, last, got 'cls'"),
        ({"input": "x", "max_tokens": 3}, "max_tokens: unknown field"),
        ({"input": "x", "model": "other"}, "model: expected 'm', got 'other'"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], text: str) -> None:
    assert APP.post(OPENAI, wrong).json()["error"]["message"].startswith(text)
