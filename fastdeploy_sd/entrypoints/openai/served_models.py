"""The models of a server, and which of them a request is for. Knows no route."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.generation import Client
from fastdeploy_sd.entrypoints.openai.preparer import LOCAL_BYTES, Preparer
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.types import AdapterSource, ModelInfo
from fastdeploy_sd.types.stats import EngineState
from fastdeploy_sd.wire.http.json_texts import text_field
from fastdeploy_sd.wire.http.model_names import resolve_model


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: its options, a client of its engines, which may still be connecting, and what prepares its requests."""

    config: Config
    client: Client
    preparer: Preparer

    @property
    def names(self) -> tuple[str, ...]:
        """Its names, at least one, and those of its adapters as they are now."""
        adapters = self.info.adapters if self.is_loaded else ()
        return (*self.config.model.served_names, *(source.adapter.name for source in adapters))

    def adapter(self, name: str) -> AdapterSource | None:
        """Return the adapter that one of its names stands for; None = the model itself."""
        return next((source for source in self.info.adapters if source.adapter.name == name), None)

    @property
    def info(self) -> ModelInfo:
        """What was loaded; Unavailable: nothing has been yet."""
        return self.client.model_info

    @property
    def is_loaded(self) -> bool:
        """Whether an engine has loaded it since this process began."""
        try:
            return bool(self.info)
        except Unavailable:
            return False


class ServedModels:
    """All of them, at least one; the first stands for a request that names none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = tuple(models)

    @property
    def _by_name(self) -> dict[str, ServedModel]:
        return {name: model for model in self.models for name in model.names}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(self._by_name)

    def loaded(self) -> list[ServedModel]:
        """Return those that an engine has loaded; Unavailable: none is yet."""
        found = [model for model in self.models if model.is_loaded]
        if not found:
            raise Unavailable("the engine is not ready")
        return found

    def named(self, name: str | None) -> tuple[str, ServedModel]:
        """Return the served name that a name means, and its model; NotFound: there is none."""
        found = resolve_model(name, self.names)
        return found, self._by_name[found]

    async def wanted_by(self, content: bytes) -> ServedModel:
        """Return the model that a body names; of a body that is none, any will say so. NotFound: there is none."""
        if len(self.models) == 1:
            return self.models[0]
        if len(content) <= LOCAL_BYTES:
            name = text_field(content, "model")
        else:
            name = await asyncio.to_thread(text_field, content, "model")
        return self.named(name)[1]

    def of_engine(self, number: int) -> tuple[ServedModel, int]:
        """Return the model of one of the server's engines, and the engine's number among those of the model."""
        for model in self.models:
            if number < (count := len(model.client.states)):
                return model, number
            number -= count
        raise ValueError("engine: expected the number of one of the engines")

    def states(self) -> list[tuple[str, EngineState]]:
        """Return the state of each engine, with its model's first name."""
        return [(model.names[0], state) for model in self.models for state in model.client.states]
