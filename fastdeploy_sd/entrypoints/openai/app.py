"""The FastAPI application: the routes of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd import __version__
from fastdeploy_sd.config import drafter_advice, explain
from fastdeploy_sd.entrypoints.openai.handler import GenerationHandler
from fastdeploy_sd.entrypoints.openai.ollama_show import ollama_model
from fastdeploy_sd.entrypoints.openai.openapi import describe
from fastdeploy_sd.entrypoints.openai.operator_routes import AdapterRoutes, ExpertRoutes
from fastdeploy_sd.entrypoints.openai.paused_engines import PausedEngines
from fastdeploy_sd.entrypoints.openai.routed import RouteGate
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel, ServedModels
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.metrics import SharedStats, render_metrics
from fastdeploy_sd.types.stats import EngineState
from fastdeploy_sd.wire.http.error_format import (
    COUNT_TOKENS_PATH,
    EMBEDDINGS_PATH,
    INFILL_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    JsonResponse,
)
from fastdeploy_sd.wire.http.middleware import (
    add_middleware,
    add_refused_routes,
    answer_live,
    routes_of,
)
from fastdeploy_sd.wire.http.ollama_models import (
    CHAT_PATH,
    EMBED_PATH,
    GENERATE_PATH,
    OLD_EMBED_PATH,
    SHOW_PATH,
    OllamaModel,
    add_model_lists,
)
from fastdeploy_sd.wire.http.pause_routes import PauseRoutes

# Field of /load -> attribute of EngineStats.
_LOAD = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "num_tokens_waiting": "num_waiting_tokens",
    "max_num_seqs": "max_num_seqs",
    "num_blocks": "num_blocks",
    "num_free_blocks": "num_free_blocks",
    "num_cached_blocks": "num_cached_blocks",
}


def create_app(
    models: Sequence[ServedModel],
    stats: SharedStats | None = None,
    gate: RouteGate = RouteGate(),  # noqa: B008 (without a reader it has no state)
) -> FastAPI:
    """Return the application that serves the models, which have the options of HTTP in common.

    Args:
        stats: what the HTTP processes count; None = there is this one, and only its requests count.
    """
    app = FastAPI(title="fastdeploy_sd", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    served, server = ServedModels(models), models[0].config.server
    handler = GenerationHandler(served, server, gate)
    app.add_api_route("/v1/chat/completions", handler.chat, methods=["POST"])
    app.add_api_route("/v1/completions", handler.completion, methods=["POST"])
    app.add_api_route(RESPONSES_PATH, handler.response, methods=["POST"])
    app.add_api_route(MESSAGES_PATH, handler.message, methods=["POST"])
    app.add_api_route(COUNT_TOKENS_PATH, handler.count_tokens, methods=["POST"])
    app.add_api_route(CHAT_PATH, handler.ollama_chat, methods=["POST"])
    app.add_api_route(GENERATE_PATH, handler.ollama_generate, methods=["POST"])
    app.add_api_route(INFILL_PATH, handler.infill, methods=["POST"])
    app.add_api_route(SHOW_PATH, handler.show, methods=["POST"])
    app.add_api_route(EMBEDDINGS_PATH, handler.embed, methods=["POST"])
    app.add_api_route(EMBED_PATH, handler.ollama_embed, methods=["POST"])
    app.add_api_route(OLD_EMBED_PATH, handler.ollama_embeddings, methods=["POST"])
    add_refused_routes(app)
    app.add_api_route("/tokenize", handler.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", handler.detokenize, methods=["POST"])
    # Of several models none moves experts between engines.
    if (eplb := models[0].config.parallel.eplb) is not None:
        ExpertRoutes(models[0].client, eplb).add_to(app)
    AdapterRoutes(served).add_to(app)
    PauseRoutes(PausedEngines(served)).add_to(app)
    stats = stats or SharedStats()
    _Info(served, stats).add_routes(app)
    add_middleware(app, server, stats.own.http)
    return app


class _Info:
    """The routes that tell about the server."""

    def __init__(self, served: ServedModels, stats: SharedStats) -> None:
        self._served = served
        self._models = served.models
        self._stats = stats
        self._created = int(time.time())

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route("/", self.root, methods=["GET"])
        app.add_api_route("/version", self.version, methods=["GET"])
        app.add_api_route("/openapi.json", self.openapi, methods=["GET"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        add_model_lists(app, self._ollama_models)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ping", self.health, methods=["GET", "POST"])
        app.add_api_route("/ready", self.health, methods=["GET"])
        app.add_api_route("/live", answer_live, methods=["GET"])
        app.add_api_route("/load", self.load, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/config-info", self.config_info, methods=["GET"])
        app.add_api_route("/props", self.props, methods=["GET"])

    async def root(self, request: HttpRequest) -> Response:
        """What this server is: name, version, model, routes."""
        about = {"name": "fastdeploy_sd", "version": __version__, "model": self._served.names[0]}
        return JsonResponse(about | {"routes": routes_of(request.app)})

    async def version(self) -> Response:
        """The version of the package."""
        return JsonResponse({"version": __version__})

    async def openapi(self, request: HttpRequest) -> Response:
        """The routes and the bodies they take, as an OpenAPI document."""
        return JsonResponse(describe(request.app.routes))

    async def health(self) -> Response:
        """200 while requests are taken, 503 with the reason when none are; of several engines with their states."""
        await self._verify_healthy()
        states = self._served.states()
        if len(states) == 1:
            return Response(status_code=200)
        engines = [
            {"engine": number, "model": model, "state": state.name} for number, (model, state) in enumerate(states)
        ]
        return JsonResponse({"engines": engines})

    async def _verify_healthy(self) -> None:
        """Raise Unavailable unless a model takes requests."""
        found = await asyncio.gather(*(m.client.verify_healthy() for m in self._models), return_exceptions=True)
        failures = [failure for failure in found if isinstance(failure, BaseException)]
        if len(failures) == len(found):
            raise failures[0]

    async def models(self) -> Response:
        """The served models under each of their names, and their adapters, as OpenAI's list; without one whose engines
        never ran.
        """
        cards = [self._model_card(name, model) for model in self._served.loaded() for name in model.names]
        return JsonResponse({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """One model of the list."""
        return JsonResponse(self._model_card(*self._served.named(name)))

    def _ollama_models(self) -> list[OllamaModel]:
        return [
            ollama_model(name, self._created, model.info, model.preparer.tokenizer, model.config)
            for model in self._served.loaded()
            for name in model.names
        ]

    async def load(self) -> Response:
        """How busy the engines are together: counts of requests, prompt tokens and KV blocks."""
        asked = await asyncio.gather(*(model.client.stats() for model in self._models), return_exceptions=True)
        found = [stats for answer in asked if not isinstance(answer, BaseException) for stats in answer.values()]
        faults = [answer for answer in asked if isinstance(answer, BaseException)]
        for fault in faults:
            if not (found and isinstance(fault, Unavailable)):
                raise fault
        return JsonResponse({name: sum(getattr(stats, field) for stats in found) for name, field in _LOAD.items()})

    async def metrics(self) -> Response:
        """Prometheus text; of an engine that does not answer, what it said last."""
        of_models = {model.names[0]: await _states(model) for model in self._models}
        body, content_type = render_metrics(of_models, self._stats.total())
        return Response(body, media_type=content_type)

    async def config_info(self) -> Response:
        """Every option with its effective value and where that came from; secrets are hidden.

        A drafting method that chooses by itself adds, under `speculation`, what it has chosen and why. A drafter that
        seems to be read wrongly adds `drafter`: what to do. Of several models each has a map of its own, in `models`.
        """
        found = {model.names[0]: await self._options_of(model) for model in self._models}
        return JsonResponse({"models": found} if len(found) > 1 else found[self._served.names[0]])

    async def props(self, request: HttpRequest) -> Response:
        """Facts about a model, in llama.cpp's form; `model` names it where there are several."""
        name, model = self._served.named(request.query_params.get("model"))
        facts = {
            "default_generation_settings": {"n_ctx": model.info.max_request_tokens},
            "total_slots": model.config.scheduler.max_num_seqs,
            "model_path": model.config.model.model,
            "model_alias": name,
            "chat_template": model.preparer.tokenizer.files.chat_template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"fastdeploy_sd {__version__}",
        }
        return JsonResponse(facts)

    async def _options_of(self, model: ServedModel) -> dict[str, Any]:
        rows = explain(model.config)
        found = {row.name: {"value": row.value, "origin": row.origin} for row in rows}
        states = await _states(model)
        for number, stats in enumerate(state.last_stats for state in states):
            origin = "engine" if len(states) == 1 else f"engine {number}"
            place = "" if len(states) == 1 else f".{number}"
            if stats is not None and stats.choice is not None:
                found[f"speculation{place}"] = {"value": asdict(stats.choice), "origin": origin}
            if stats is not None and stats.misread_drafter:
                advice = drafter_advice(model.config, stats.misread_drafter)
                found[f"drafter{place}"] = {"value": advice, "origin": origin}
        return found

    def _model_card(self, name: str, model: ServedModel) -> dict[str, Any]:
        info = model.info
        speculation = info.speculation
        adapter = model.adapter(name)
        of_adapter = {} if adapter is None else {"root": adapter.folder, "parent": model.config.model.served_name}
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastdeploy_sd",
            "max_model_len": info.max_request_tokens,
            "speculation": {
                "method": speculation.method,
                "methods": list(speculation.methods),
                "max_draft_tokens": speculation.max_draft_tokens,
                "lossy": speculation.lossy,
                "draft_logprobs": speculation.has_draft_logprobs,
            },
            **of_adapter,
        }


async def _states(model: ServedModel) -> tuple[EngineState, ...]:
    """The states of a model's engines; with statistics of now or, of those that do not answer, what they said last."""
    with suppress(Unavailable):
        await model.client.stats()
    return model.client.states
