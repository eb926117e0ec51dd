"""Routes of OpenAI that clients know and that a server of language models has no answer to. Reads no body."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from fastdeploy_sd.errors import BadRequest


def add_refused_routes(app: FastAPI) -> None:
    """Add them: each is a 400 with the code `not_supported`, which no client tries again."""
    app.add_api_route("/v1/embeddings", _embeddings, methods=["POST"], name="embeddings")


async def _embeddings() -> Response:
    """Refused: the model generates text and embeds none."""
    raise BadRequest(
        "embeddings: not supported: the model generates text; serve an embedding model elsewhere, and give the client"
        " its address",
        param="model",
        code="not_supported",
    )
