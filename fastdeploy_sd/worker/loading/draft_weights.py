"""Finds the draft models of a configuration. Reads only names and shapes of their weights; needs no Paddle."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.draft_model import FINAL_NORM, DraftModel, DraftWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.types.draft_methods import METHODS

# The target's hidden rows that its pass keeps for draft models.
_KEPT_ROWS = frozenset({FINAL_NORM})


def open_draft_weights(config: Config, target: ModelSource, target_config: DecoderConfig) -> Mapping[str, DraftWeights]:
    """Return method -> weights of every draft model that the configuration needs, found but not read.

    Raises:
        ConfigError: no such weights, too few layers for `num_model_steps`, or a model reads rows of the target that are
            not kept.
        CheckpointError: they are malformed, or do not fit the target.
    """
    speculative, found = config.speculative, dict[str, DraftWeights]()
    for name in speculative.draft_models:
        open_weights = cast(Callable[..., DraftWeights], _function(METHODS[name].draft_weights))
        weights = found[name] = open_weights(target, target_config, speculative.model)
        if unknown := sorted(set(weights.reads) - _KEPT_ROWS):
            wanted = f"a model that reads {', '.join(sorted(_KEPT_ROWS))} of the target at most"
            raise ConfigError(
                f"speculative_config.method: expected {wanted}, got {name}, which reads {', '.join(unknown)}",
                param="speculative_config",
            )
        weights.verify(speculative.num_model_steps)
    return found


def model_builder(method: str) -> Callable[..., DraftModel]:
    """Return the function that builds a method's model; see DraftMethod.draft_model."""
    return cast(Callable[..., DraftModel], _function(METHODS[method].draft_model))


def _function(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module, "fastdeploy_sd.models"), name)
