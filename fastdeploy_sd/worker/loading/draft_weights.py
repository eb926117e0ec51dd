"""Finds the draft models of a configuration. Reads only names and shapes of their weights; needs no Paddle."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_decoder_weights import DraftDecoderWeights
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM, DraftModel, DraftWeights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types.draft_methods import METHODS
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard
from fastdeploy_sd.worker.loading.draft_vocabulary import fit_vocabulary


def open_draft_weights(config: Config, target: ModelSource, target_config: DecoderConfig) -> Mapping[str, DraftWeights]:
    """Return method -> weights of every draft model that the configuration needs, found but not read.

    Raises:
        ConfigError: no such weights, too few layers for `num_model_steps`, a model reads rows of layers that the target
            has not, or a whole model has another vocabulary.
        CheckpointError: they are malformed, or do not fit the target.
    """
    speculative, found = config.speculative, dict[str, DraftWeights]()
    for name in speculative.draft_models:
        open_weights = cast(Callable[..., DraftWeights], _function(METHODS[name].draft_weights))
        weights = found[name] = open_weights(target, target_config, speculative.model)
        if unknown := [layer for layer in weights.reads if not FINAL_NORM <= layer <= target_config.num_layers]:
            wanted = f"one that reads what enters layers 0 to {target_config.num_layers} of the target"
            raise ConfigError(
                f"speculative_config.model: expected {wanted}, got {name} of {weights.checkpoint.path}, which reads"
                f" {', '.join(map(str, unknown))}",
                param="speculative_config",
            )
        weights.verify(speculative.num_model_steps)
        if isinstance(weights, DraftDecoderWeights):
            fit_vocabulary(config, target_config.vocab_size, weights)
    return found


def parts_of_rank(
    config: Config, drafts: Mapping[str, DraftWeights], shard: Shard
) -> Mapping[str, tuple[DraftWeights, Shard]]:
    """Return the draft models that a rank has, by method, and which part of each."""
    if config.speculative.draft_tensor_parallel_size != 1:
        return {name: (weights, shard) for name, weights in drafts.items()}
    return {name: (weights, WHOLE_MODEL) for name, weights in drafts.items() if shard.rank == 0}


def used_layers(config: Config, weights: DraftWeights) -> DecoderConfig:
    """Return the decoder of a draft model with the layers that are loaded: not all MTP layers make drafts."""
    own, num_kv_layers = weights.config, weights.num_kv_layers(config.speculative.num_model_steps)
    if num_kv_layers >= len(own.attentions):
        return own
    return replace(own, layers=own.layers[:num_kv_layers])


def model_builder(method: str) -> Callable[..., DraftModel]:
    """Return the function that builds a method's model; see DraftMethod.draft_model."""
    return cast(Callable[..., DraftModel], _function(METHODS[method].draft_model))


def _function(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module, "fastdeploy_sd.models"), name)


# A pass of a draft layer reads the whole head, most of its bytes. Four bits halve or quarter them, and lose at most
# half a percent of the accepted drafts (bench speculation, demo model).
_AUTO_HEAD: LinearFormat = "wint4"
# The linear layers are most of the other bytes. Eight bits lose about one accepted draft in a thousand.
_AUTO_LINEAR: LinearFormat = "wint8"


def own_scheme(config: Config) -> QuantScheme:
    """Return the scheme that `speculative_config.quantization` sets for draft layers, whatever their head's format."""
    asked, dtype = config.speculative.quantization, config.model.dtype
    if asked is not None:
        return QuantScheme.create(dtype, None if asked == "none" else asked)
    scheme = QuantScheme.create(dtype, config.model.quantization)
    linear, experts = (_AUTO_LINEAR if fmt == dtype else fmt for fmt in (scheme.linear, scheme.experts))
    return replace(scheme, linear=linear, experts=experts)


def draft_scheme(config: Config) -> QuantScheme:
    """Return the scheme of the draft layers' own weights."""
    scheme = own_scheme(config)
    return replace(scheme, lm_head=draft_head_format(config, scheme.lm_head))


def draft_head_format(config: Config, own: LinearFormat) -> LinearFormat:
    """Return the format in which draft layers read a head that is otherwise stored as `own`."""
    asked = config.speculative.draft_head_quantization
    if asked == "target":
        return own
    return _AUTO_HEAD if asked == "auto" else asked
