"""Requests for the models of one server: each is answered by the model it names."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel, ServedModels
from tests.doubles.preparer import LocalPreparer
from tests.unit.entrypoints.scripted_app import INFO, Script, ScriptedClient
from tests.unit.text.vocabularies import GOLDEN

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


class Models:
    """Two scripted models: "first", which is also "one", and "second"."""

    def __init__(self) -> None:
        self.clients = [ScriptedClient(INFO) for _ in range(2)]
        self.served = [
            ServedModel(config, client, LocalPreparer(config, partial(getattr, client, "model_info")))
            for config, client in zip(map(config_of, (("first", "one"), ("second",))), self.clients, strict=True)
        ]

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        for client in self.clients:
            client.scripts = [Script([[5, 6]])]
            client.submitted.clear()
        return asyncio.run(_send(create_app(self.served), method, path, body))

    @property
    def num_submitted(self) -> list[int]:
        return [len(client.submitted) for client in self.clients]


def config_of(names: tuple[str, ...]) -> Config:
    return Config(model=ModelConfig(model=str(GOLDEN), served_model_name=names))


async def _send(app: FastAPI, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        return await http.request(method, path, json=body)


def body_of(path: str, model: str | None, text: str = "Hello") -> dict[str, Any]:
    key = {"/v1/responses": "input", "/v1/completions": "prompt", "/api/generate": "prompt"}.get(path)
    prompt = {"messages": [{"role": "user", "content": text}]} if key is None else {key: text}
    limit = {"max_tokens": 2} if path in PATHS[:2] or path == "/v1/messages" else {}
    return ({} if model is None else {"model": model}) | prompt | limit


@pytest.mark.parametrize("path", PATHS)
def test_the_model_of_a_body_answers(path: str) -> None:
    models = Models()
    for name, expected in (("first", [1, 0]), ("one", [1, 0]), ("second", [0, 1]), ("second:latest", [0, 1])):
        response = models.send("POST", path, body_of(path, name))
        assert (response.status_code, models.num_submitted) == (200, expected), response.text
    response = models.send("POST", path, body_of(path, "third"))
    assert response.status_code == 404
    assert "model: expected one of 'first', 'one', 'second', got 'third'" in response.text


def test_a_body_without_a_model_and_a_large_one_are_answered_too() -> None:
    models = Models()
    assert models.send("POST", PATHS[0], body_of(PATHS[0], "default")).json()["model"] == "first"
    assert models.send("POST", PATHS[1], body_of(PATHS[1], None)).json()["model"] == "first"
    too_long = models.send("POST", PATHS[0], body_of(PATHS[0], "second", '"model": "first" ' * 2000))
    assert too_long.status_code == 400
    body = {"prompt": "a", "max_tokens": 2, "metadata": {"model": "first" * 8000}, "model": "second"}
    assert (models.send("POST", PATHS[1], body).status_code, models.num_submitted) == (200, [0, 1])
    assert models.send("POST", PATHS[1]).status_code == 400


def test_what_tells_about_the_server_tells_of_each_model() -> None:
    models = Models()
    names = ["first", "one", "second"]
    assert [card["id"] for card in models.send("GET", "/v1/models").json()["data"]] == names
    assert models.send("GET", "/v1/models/second").json()["id"] == "second"
    assert models.send("GET", "/v1/models/third").status_code == 404
    assert [model["model"] for model in models.send("GET", "/api/tags").json()["models"]] == [
        f"{name}:latest" for name in names
    ]
    assert models.send("POST", "/tokenize", {"model": "second", "prompt": "a"}).status_code == 200
    ready = {"state": "ready"}
    assert models.send("GET", "/health").json()["engines"] == [
        {"engine": 0, "model": "first"} | ready,
        {"engine": 1, "model": "second"} | ready,
    ]
    lines = models.send("GET", "/metrics").text.splitlines()
    assert 'fastdeploy_sd:engine_silence_seconds{engine="1",model_name="second"} 0.0' in lines
    options = models.send("GET", "/config-info").json()["models"]
    assert options["second"]["served_model_name"]["value"] == ["second"]
    props = models.send("GET", "/props?model=second").json()
    assert (props["model_alias"], props["default_generation_settings"]) == ("second", {"n_ctx": 512})
    assert models.send("GET", "/load").json()["num_requests_running"] == 0


def test_a_model_or_an_engine_is_paused_and_what_is_asked_for_wrongly_is_refused() -> None:
    models = Models()
    for path, paused in (
        ("/pause?model=one", [True, False]),
        ("/resume?model=first&engine=0", [False, False]),
        ("/v1/pause?engine=1&mode=wait", [False, True]),
        ("/pause", [True, True]),
        ("/v1/resume", [False, False]),
    ):
        assert models.send("POST", path).json() == {"is_paused": "pause" in path, "num_requests": 0}
        assert [client.state.is_paused for client in models.clients] == paused
    assert models.send("GET", "/is_paused?engine=0").json() == {"is_paused": False, "num_requests": 0}
    for query, status, param in (
        ("mode=abort", 400, "mode"),
        ("engine=2", 400, "engine"),
        ("engine=x", 400, "engine"),
        ("model=second&engine=0", 400, "engine"),
        ("model=third", 404, "model"),
        ("rank=0", 400, "rank"),
    ):
        response = models.send("POST", f"/pause?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_engines_are_numbered_through_all_models() -> None:
    models = Models()
    served = ServedModels(models.served)
    assert [served.of_engine(number) for number in range(2)] == [(model, 0) for model in models.served]


def test_adapters_are_loaded_for_the_model_that_is_named(tmp_path: Path) -> None:
    models = Models()
    lora = LoraConfig(True, lora_root=str(tmp_path))
    models.served[0] = replace(models.served[0], config=replace(models.served[0].config, lora=lora))
    body = {"lora_name": "tuned", "lora_path": "a"}
    assert models.send("POST", "/v1/load_lora_adapter", body).status_code == 200, "only one may have adapters"
    models.served[1] = replace(models.served[1], config=replace(models.served[1].config, lora=lora))
    for extra, name, status, text in (
        ({}, "more", 400, "base_model_name: expected one of 'first', 'second', got null"),
        ({"base_model_name": "third"}, "more", 404, "'first', 'one', 'tuned', 'second'"),
        ({"base_model_name": "second"}, "tuned", 400, "lora_name: expected a name that is not in use, got 'tuned'"),
        ({"base_model_name": "second"}, "first", 400, "lora_name: expected a name that is not in use, got 'first'"),
        ({"base_model_name": "second"}, "more", 200, "added"),
    ):
        answer = models.send("POST", "/v1/load_lora_adapter", body | {"lora_name": name} | extra)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
    cards = models.send("GET", "/v1/models").json()["data"]
    assert {card["id"]: card.get("parent") for card in cards} == {
        "first": None, "one": None, "tuned": "first", "second": None, "more": "second",
    }  # fmt: skip
    assert models.send("POST", "/v1/unload_lora_adapter", {"lora_name": "more"}).status_code == 200
    assert [len(client.model_info.adapters) for client in models.clients] == [1, 0]
    assert models.send("POST", "/v1/completions", body_of("/v1/completions", "tuned")).status_code == 200
