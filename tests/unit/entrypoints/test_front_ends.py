"""Requests of programs for people: they are taken as they are sent, and answered with what is read of them.

Open WebUI has connections of OpenAI's and of Ollama's kind (its routers `openai` and `ollama`); aider speaks OpenAI's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.entrypoints.scripted_app import Script, ScriptedApp

SCRIPT = [Script([[5, 6, 7], [8]])]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
]
PARAMS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64, "frequency_penalty": 0.1, "seed": 3, "stop": ["\n\n"]}
TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Find.", "parameters": {"type": "object", "properties": {}}},
}
TASK = [{"role": "user", "content": "### Task:\nGenerate a title as JSON."}]
OF_OLLAMA = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "num_predict": 64, "num_ctx": 512}
OF_OLLAMA |= {"repeat_penalty": 1.1, "repeat_last_n": -1, "min_p": 0.0, "num_keep": 24, "num_batch": 512, "num_gpu": 1}


@pytest.fixture(scope="module")
def app() -> ScriptedApp:
    return ScriptedApp()


def test_a_connection_is_verified_by_its_models(app: ScriptedApp) -> None:
    listed = app.get("/v1/models")
    assert [(card["id"], card["object"], bool(card["owned_by"])) for card in listed["data"]] == [("m", "model", True)]
    [model] = app.get("/api/tags")["models"]
    assert (model["model"], model["name"]) == ("m:latest", "m:latest")
    assert {"size", "digest", "modified_at", "details"} <= set(model)
    assert app.get("/api/ps")["models"][0]["model"] == "m:latest"
    assert isinstance(app.get("/api/version")["version"], str)


@pytest.mark.parametrize(
    "options", [{}, PARAMS, {"tools": [TOOL], "tool_choice": "auto"}, {"max_completion_tokens": 100}]
)
def test_a_chat_over_openais_route(app: ScriptedApp, options: dict[str, Any]) -> None:
    chunks = app.chunks("/v1/chat/completions", {"model": "m", "messages": TURNS, **options}, SCRIPT)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    body = {"model": "m", "messages": TASK, "stream": False, **options}
    title = app.post("/v1/chat/completions", body, SCRIPT)
    assert title.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("options", [{}, OF_OLLAMA])
def test_a_chat_over_ollamas_route(app: ScriptedApp, options: dict[str, Any]) -> None:
    turns = [*TURNS[:3], {"role": "user", "content": "And now?", "images": []}]
    body = {"model": "m:latest", "messages": turns, "stream": True, "options": options, "keep_alive": "5m"}
    answer = app.post("/api/chat", body, SCRIPT)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines)
    durations = {f"{name}_duration" for name in ("total", "load", "prompt_eval", "eval")}
    told = {"prompt_eval_count", "eval_count", *durations}
    assert told <= set(lines[-1])
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = app.post("/api/chat", body | {"messages": TASK, "stream": False, "format": "json"}, SCRIPT)
    assert whole.status_code == 200, whole.text


def test_texts_for_its_search_are_embedded_over_both_routes(app: ScriptedApp) -> None:
    found = app.post("/v1/embeddings", {"input": ["a", "b"], "model": "m"})
    assert [len(entry["embedding"]) for entry in found.json()["data"]] == [4, 4]
    assert len(app.post("/api/embed", {"input": ["a"], "model": "m:latest"}).json()["embeddings"]) == 1


@pytest.mark.parametrize("num_examples", [1, 2])
def test_aider_asks_for_edits_after_examples(app: ScriptedApp, num_examples: int) -> None:
    """One of whole files, two of blocks to search and replace."""
    example = [
        {"role": "user", "content": "Change it."},
        {"role": "assistant", "content": "Ok:\n\n```\na\n```"},
    ]
    files = [{"role": "user", "content": "I have *added these files*"}, {"role": "assistant", "content": "Ok."}]
    turns = [TURNS[0], *example * num_examples, *files, {"role": "user", "content": "Mend it.\n\n# *SEARCH/REPLACE*"}]
    body = {"messages": turns, "model": "m", "stream": True, "temperature": 0}
    answer = app.post("/v1/chat/completions", body, SCRIPT)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    chunks = [json.loads(event)["choices"][0] for event in events[:-2]]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert chunks[-1]["finish_reason"] == "length"
