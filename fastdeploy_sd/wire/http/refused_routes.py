"""Routes of OpenAI that this server refuses by name, as it serves a language model. Reads no body."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from fastdeploy_sd.errors import BadRequest, NotFound, shown
from fastdeploy_sd.wire.http.stream_errors import RESPONSES_PATH


def add_refused_routes(app: FastAPI) -> None:
    """Add them: each is a 400 or 404, which no client tries again, and says why."""
    app.add_api_route("/v1/embeddings", _embeddings, methods=["POST"], name="embeddings")
    app.add_api_route(f"{RESPONSES_PATH}/{{response_id}}", _stored, methods=["GET", "DELETE"], name="stored_response")


async def _embeddings() -> Response:
    """Refused: the model generates text and embeds none."""
    raise BadRequest(
        "embeddings: not supported: the model generates text; serve an embedding model elsewhere, and give the client"
        " its address",
        param="model",
        code="not_supported",
    )


async def _stored(response_id: str) -> Response:
    """Refused: no Response is stored."""
    raise NotFound(
        f"response: expected none by its id, as none is stored, got {shown(response_id)}",
        param="response_id",
        code="response_not_found",
    )
