"""Engines of a server that refuse new requests while an operator wants that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastdeploy_sd.entrypoints.openai.served_models import ServedModel, ServedModels
from fastdeploy_sd.errors import BadRequest, shown

_ENGINE, _MODEL = "engine", "model"


class PausedEngines:
    """See `Pausable`; a part is a model, one engine by its number through all models, or all of them."""

    selectors: tuple[str, ...] = (_MODEL, _ENGINE)

    def __init__(self, served: ServedModels) -> None:
        self._served = served

    async def set_paused(self, part: Mapping[str, str], *, is_paused: bool) -> None:
        chosen = self._chosen(part)
        outcomes = await asyncio.gather(
            *(model.client.set_paused(engine, is_paused=is_paused) for model, engine in chosen), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def num_requests(self, part: Mapping[str, str]) -> int:
        chosen = self._chosen(part)
        found = {model.names[0]: await model.client.stats() for model, _ in chosen}
        stats = [found[model.names[0]].get(engine) for model, engine in chosen]
        return sum(of_engine.num_running + of_engine.num_waiting for of_engine in stats if of_engine is not None)

    def is_paused(self, part: Mapping[str, str]) -> bool:
        return all(model.client.states[engine].is_paused for model, engine in self._chosen(part))

    def _chosen(self, part: Mapping[str, str]) -> list[tuple[ServedModel, int]]:
        """Return engines, each with its model and its number among those of the model."""
        models = self._served.models if _MODEL not in part else (self._served.named(part[_MODEL])[1],)
        engines = [(model, engine) for model in models for engine in range(len(model.client.states))]
        if _ENGINE not in part:
            return engines
        count, text = len(self._served.states()), part[_ENGINE]
        chosen = self._served.of_engine(int(text)) if text.isdecimal() and int(text) < count else None
        if chosen not in engines or chosen is None:
            wanted = f"a number in 0..{count - 1}" + ", of the model's engines" * (_MODEL in part)
            raise BadRequest(f"engine: expected {wanted}, got {shown(text)}", param=_ENGINE)
        return [chosen]
