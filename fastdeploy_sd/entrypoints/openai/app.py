"""The FastAPI application: routes, authentication, and one shape for every error."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from fastdeploy_sd.config import Config, explain
from fastdeploy_sd.entrypoints.openai.auth import BearerAuth
from fastdeploy_sd.entrypoints.openai.error_format import JsonResponse, error_response, to_fdsd_error
from fastdeploy_sd.entrypoints.openai.generation import Client
from fastdeploy_sd.entrypoints.openai.handler import GenerationHandler, model_not_found
from fastdeploy_sd.entrypoints.text.tokenizer import load_tokenizer
from fastdeploy_sd.errors import BadRequest, FdsdError, NotFound, Unavailable
from fastdeploy_sd.metrics import render_metrics


def create_app(client: Client, config: Config) -> FastAPI:
    """Return the application that serves the model behind `client`.

    Args:
        client: may still be connecting; until then /health is 503.
        config: what was started; tokenizer and chat template are read from it now.

    Raises:
        CheckpointError: the tokenizer's files are missing or malformed.
        ConfigError: the tokenizer backend is not installed.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend)
    app = FastAPI(title="fastdeploy_sd", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    handler = GenerationHandler(client, config, tokenizer)
    app.add_api_route("/v1/chat/completions", handler.chat, methods=["POST"])
    app.add_api_route("/v1/completions", handler.completion, methods=["POST"])
    _Info(client, config).add_routes(app)
    app.add_middleware(BearerAuth, api_keys=config.server.api_key)
    app.add_exception_handler(FdsdError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_error)
    return app


class _Info:
    """The routes that tell about the server."""

    def __init__(self, client: Client, config: Config) -> None:
        self._client = client
        self._config = config
        self._created = int(time.time())

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ping", self.health, methods=["GET", "POST"])
        app.add_api_route("/load", self.load, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/config-info", self.config_info, methods=["GET"])

    async def health(self) -> Response:
        """200 with an empty body while the engine takes requests, 503 when it is down or finishes its last ones."""
        self._verify_alive()
        if self._client.is_draining:
            raise Unavailable("the server is draining: it takes no new requests", code="draining")
        return Response(status_code=200)

    async def models(self) -> Response:
        """The one served model, as OpenAI's list."""
        return JsonResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """One model of the list."""
        if name != self._config.model.served_name:
            raise model_not_found(name, self._config.model.served_name)
        return JsonResponse(self._model_card())

    async def load(self) -> Response:
        """How busy the engine is: counts of requests, prompt tokens and KV blocks."""
        stats = await self._client.stats()
        return JsonResponse(
            {
                "num_requests_running": stats.num_running,
                "num_requests_waiting": stats.num_waiting,
                "num_tokens_waiting": stats.num_waiting_tokens,
                "max_num_seqs": stats.max_num_seqs,
                "num_blocks": stats.num_blocks,
                "num_free_blocks": stats.num_free_blocks,
                "num_cached_blocks": stats.num_cached_blocks,
            }
        )

    async def metrics(self) -> Response:
        """Prometheus text."""
        body, content_type = render_metrics(await self._client.stats())
        return Response(body, media_type=content_type)

    async def config_info(self) -> Response:
        """Every option with its effective value and where that came from; secrets are hidden."""
        rows = explain(self._config)
        return JsonResponse({row.name: {"value": row.value, "origin": row.origin} for row in rows})

    def _model_card(self) -> dict[str, Any]:
        model = self._client.model_info
        speculation = model.speculation
        return {
            "id": self._config.model.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastdeploy_sd",
            "max_model_len": model.max_request_tokens,
            "speculation": {
                "method": speculation.method,
                "methods": list(speculation.methods),
                "max_draft_tokens": speculation.max_draft_tokens,
                "lossy": speculation.lossy,
                "draft_logprobs": speculation.has_draft_logprobs,
            },
        }

    def _verify_alive(self) -> None:
        if not self._client.is_alive:
            raise Unavailable("the engine is down", code="engine_down")


async def _answer_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(to_fdsd_error(error, request))


async def _answer_http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors: unknown route (404), wrong method (405), malformed request (400)."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    where = f"{request.method} {request.url.path}"
    known = {
        404: NotFound(f"route: expected one this server has, got {where}", code="route_not_found"),
        405: _MethodNotAllowed(f"method: expected another one for this route, got {where}", code="method_not_allowed"),
    }
    response = error_response(known.get(error.status_code, BadRequest(f"request: {error.detail}")))
    response.headers.update(error.headers or {})
    return response


class _MethodNotAllowed(BadRequest):
    status = 405
