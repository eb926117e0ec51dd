"""The OpenAPI description of the server: its routes, and the bodies as the validator's own models say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from fastdeploy_sd import __version__
from fastdeploy_sd.entrypoints.openai.protocol import (
    Body,
    ChatCompletionBody,
    CompletionBody,
    CountTokensBody,
    DetokenizeBody,
    EmbeddingBody,
    InfillBody,
    MessagesBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
    ResponseBody,
    TokenizeBody,
)
from fastdeploy_sd.entrypoints.openai.protocol.adapters import LoadAdapterBody, UnloadAdapterBody
from fastdeploy_sd.entrypoints.openai.protocol.experts import CheckRedundantBody, ExpertTokensBody, RearrangeBody
from fastdeploy_sd.wire.http.api_paths import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from fastdeploy_sd.wire.http.error_format import (
    COUNT_TOKENS_PATH,
    EMBEDDINGS_PATH,
    INFILL_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
)
from fastdeploy_sd.wire.http.ollama_models import CHAT_PATH, EMBED_PATH, GENERATE_PATH, OLD_EMBED_PATH, SHOW_PATH

BODIES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/completions": CompletionBody,
    RESPONSES_PATH: ResponseBody,
    MESSAGES_PATH: MessagesBody,
    COUNT_TOKENS_PATH: CountTokensBody,
    CHAT_PATH: OllamaChatBody,
    GENERATE_PATH: OllamaGenerateBody,
    SHOW_PATH: OllamaShowBody,
    INFILL_PATH: InfillBody,
    EMBEDDINGS_PATH: EmbeddingBody,
    EMBED_PATH: OllamaEmbedBody,
    OLD_EMBED_PATH: OllamaEmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/rearrange_experts": RearrangeBody,
    "/get_per_expert_tokens_stats": ExpertTokensBody,
    "/check_redundant": CheckRedundantBody,
    LOAD_ADAPTER_PATH: LoadAdapterBody,
    UNLOAD_ADAPTER_PATH: UnloadAdapterBody,
}
_TEXT = {"type": ["string", "null"]}
_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def describe(routes: Iterable[object]) -> dict[str, Any]:
    """Return the OpenAPI document of an application's routes."""
    _, definitions = models_json_schema(
        [(body_type, "validation") for body_type in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, APIRoute):
            path = route.path.replace(":path}", "}")
            paths.setdefault(path, {}).update(
                {method.lower(): _operation(route) for method in sorted(route.methods or ())}
            )
    return {
        "openapi": "3.1.0",
        "info": {"title": "fastdeploy_sd", "version": __version__},
        "paths": paths,
        "components": {"schemas": definitions["$defs"] | {"Error": _ERROR_SCHEMA}},
    }


def _operation(route: APIRoute) -> dict[str, Any]:
    error = {"description": "error", "content": _json("Error")}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": (route.endpoint.__doc__ or "").partition("\n")[0],
        "responses": {"200": {"description": "done"}, "default": error},
    }
    if (body_type := BODIES.get(route.path)) is not None:
        operation["requestBody"] = {"required": True, "content": _json(body_type.__name__)}
    names = [part[1:].partition(":")[0].rstrip("}") for part in route.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
