"""What Ollama's routes tell of models: a server of its own, a router of those of its instances."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from fastdeploy_sd.wire.http.error_format import JsonResponse

SHOW_PATH = "/api/show"
CHAT_PATH, GENERATE_PATH = "/api/chat", "/api/generate"
EMBED_PATH, OLD_EMBED_PATH = "/api/embed", "/api/embeddings"
LATEST = ":latest"
# Of Ollama, whose routes these are: clients ask for what came with some version of it.
_VERSION = "0.12.6"
_NEVER = "2318-01-01T00:00:00Z"  # as Ollama writes the end of a model that stays loaded

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A served model under one of its names.

    Attributes:
        created: when it was loaded, in seconds since the epoch.
        fingerprint: of its weights, "" = not known.
        size: of its weights in bytes, 0 = not known.
    """

    name: str
    created: int
    context_length: int
    fingerprint: str = ""
    size: int = 0
    family: str = ""
    quantization: str = ""

    @property
    def tagged_name(self) -> str:
        """Its name as Ollama's clients write it, with a tag."""
        return self.name if ":" in self.name else self.name + LATEST

    @property
    def details(self) -> Json:
        """What there is to know of the files."""
        return {
            "parent_model": "",
            "format": "",
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": "",
            "quantization_level": self.quantization,
        }

    def entry(self) -> Json:
        """Return its entry in the list of models."""
        return {**self._entry(), "modified_at": timestamp(self.created)}

    def running(self) -> Json:
        """Return its entry in the list of models in memory."""
        return {
            **self._entry(),
            "expires_at": _NEVER,
            "size_vram": self.size,
            "context_length": self.context_length,
        }

    def shown(self, template: str, capabilities: Sequence[str]) -> Json:
        """Return all that is known of it."""
        family = self.family or "unknown"
        facts = {"general.architecture": family, f"{family}.context_length": self.context_length}
        return {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": self.details,
            "model_info": facts,
            "capabilities": list(capabilities),
            "modified_at": timestamp(self.created),
        }

    def _entry(self) -> Json:
        return {
            "name": self.tagged_name,
            "model": self.tagged_name,
            "size": self.size,
            "digest": hashlib.sha256((self.fingerprint or self.name).encode("utf-8")).hexdigest(),
            "details": self.details,
        }


def add_model_lists(app: FastAPI, find: Callable[[], Sequence[OllamaModel]]) -> None:
    """Add the routes that list models, all of which are in memory, and the one that tells Ollama's version."""

    async def tags() -> Response:
        """The models under each of their names."""
        return JsonResponse({"models": [model.entry() for model in find()]})

    async def running() -> Response:
        """The same models, as those that are in memory."""
        return JsonResponse({"models": [model.running() for model in find()]})

    async def version() -> Response:
        """The version of Ollama whose routes these are, for its clients."""
        return JsonResponse({"version": _VERSION})

    for path, route in (("/api/tags", tags), ("/api/ps", running), ("/api/version", version)):
        app.add_api_route(path, route, methods=["GET"])


def timestamp(seconds: float) -> str:
    """Return a time of the epoch as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
