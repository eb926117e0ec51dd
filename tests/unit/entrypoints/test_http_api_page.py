"""docs/http_api.md names every route, field of a request and status; its tables name none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi.routing import APIRoute

from fastdeploy_sd import errors
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.handler import GenerationHandler
from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, CompletionBody, ResponseBody
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.wire.http.api_paths import GENERATION_PATHS, TEXT_PATHS
from tests.doubles.preparer import LocalPreparer
from tests.unit.entrypoints.scripted_app import BALANCED, INFO, ScriptedClient
from tests.unit.text.vocabularies import GOLDEN

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "http_api.md").read_text(encoding="utf-8")
ROUTES, REQUESTS, _, ERRORS = re.split(r"^## .*$", PAGE, flags=re.MULTILINE)


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_routes() -> None:
    config = Config(model=ModelConfig(model=str(GOLDEN)), parallel=BALANCED)
    app = create_app([ServedModel(config, ScriptedClient(INFO), LocalPreparer(config, lambda: INFO))])
    served = {f"{method} {r.path}" for r in app.routes if isinstance(r, APIRoute) for method in r.methods or ()}
    listed = {name for row in rows(ROUTES) for name in names(row[0])}
    assert {route.replace("{name:path}", "{name}") for route in served} == listed
    handled = {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and isinstance(getattr(route.endpoint, "__self__", None), GenerationHandler)
    }
    assert handled == {*GENERATION_PATHS, *TEXT_PATHS}, "routers relay all of them"


def test_fields() -> None:
    chat, completions = set(ChatCompletionBody.model_fields), set(CompletionBody.model_fields)
    of_route = {"both": chat & completions, "chat": chat, "completions": completions - chat}
    for fields, route, _ in (row for row in rows(REQUESTS) if len(row) == 3 and row[1] in of_route):
        assert set(names(fields)) <= of_route[route], fields
    assert chat | completions <= set(names(REQUESTS))


def test_fields_of_responses() -> None:
    """Those that the other routes have too are in their tables."""
    own = set(ResponseBody.model_fields) - set(ChatCompletionBody.model_fields)
    assert own <= set(names(REQUESTS.partition("### Responses")[2]))


def test_statuses() -> None:
    listed = {(int(status), *names(kind)) for status, kind, _ in rows(ERRORS)}
    raised = {(e.status, e.type) for e in vars(errors).values() if isinstance(e, type) and issubclass(e, FdsdError)}
    assert listed == raised - {(ConfigError.status, ConfigError.type)}
