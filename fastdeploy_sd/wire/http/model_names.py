"""Checks the `model` of a request: a served model, which may have several names, or an adapter of it. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.errors import NotFound, shown
from fastdeploy_sd.types import Adapter
from fastdeploy_sd.wire.http.ollama_models import LATEST

# What clients send that know no name: FastDeploy's default value and its examples', and an empty setting.
_UNNAMED = (None, "", "default", "null")


def resolve_model(asked: str | None, served: Sequence[str]) -> str:
    """Return the served name that a request means; the first stands for an unnamed model. NotFound: another model.

    A name without a tag is also known with Ollama's, which its clients add.
    """
    for name in served:
        if asked in (name, name + LATEST):
            return name
    if asked in _UNNAMED:
        return served[0]
    wanted = repr(served[0]) if len(served) == 1 else f"one of {', '.join(map(repr, served))}"
    raise NotFound(f"model: expected {wanted}, got {shown(asked)}", param="model", code="model_not_found")


class ModelNames:
    """What requests may name: the model by its names, and its adapters.

    Attributes:
        adapters: as they are now.
    """

    def __init__(self, served: Sequence[str], adapters: Sequence[Adapter] = ()) -> None:
        self._served, self.adapters = tuple(served), tuple(adapters)

    def resolve(self, asked: str | None) -> str:
        """Return the name that a request means, as `resolve_model`."""
        return resolve_model(asked, (*self._served, *(adapter.name for adapter in self.adapters)))

    def adapter_of(self, name: str) -> Adapter | None:
        """Return the adapter with a name that `resolve` returned; None = it is the model's."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)
