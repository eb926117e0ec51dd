"""What is doubtful in the config.json of a drafter: programs write the same words for other computations, or none.

Knows EAGLE heads and MTP layers; other drafters leave nothing open. Needs no Paddle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.drafters.drafter_kind import DRAFT_MODEL, KINDS, MTP, P_EAGLE, drafter_kind, method_of
from fastdeploy_sd.models.drafters.eagle_config import EagleConfig, read_eagle, read_eagle3, read_p_eagle
from fastdeploy_sd.models.drafters.mtp_weights import (
    HIDDEN,
    HIDDEN_KEY,
    REFEED,
    REFEED_KEY,
    find_names,
    open_mtp_weights,
)
from fastdeploy_sd.models.registry import read_decoder_config

_TAPS, _NESTED, _LAYERS = "eagle_aux_hidden_state_layer_ids", "eagle_config", "transformer_layer_config"
_POST_NORM, _RESIDUAL, _THETA = "norm_output", "norm_before_residual", "rope_theta"
_OPTIONS = {HIDDEN_KEY: HIDDEN, REFEED_KEY: REFEED}
_ROPE_MAPS = ("rope_parameters", "rope_scaling")
_THETA_OF_HEADS = 10_000.0
# Kind -> what reads its config.json, and the keys that are doubtful.
_DOUBTFUL = {
    "eagle": (read_eagle, (_THETA,)),
    "eagle3": (read_eagle3, (_TAPS, _RESIDUAL, _POST_NORM, _THETA)),
    P_EAGLE: (read_p_eagle, (_TAPS, _RESIDUAL, _THETA)),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a folder: `values` of config.json, and the words for what they change."""

    text: str
    values: Mapping[str, Any]


class DrafterReadings:
    """A drafter's folder and the ways to read it.

    Attributes:
        method: that runs it, or its kind where none does; kind_text: see models.drafters.drafter_kind.
        as_is: what is read now, each doubtful key said outright.

    Raises CheckpointError: the folder holds no drafter for the model.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._source = Checkpoint(folder)
        kind = drafter_kind(self._source)
        if kind == DRAFT_MODEL and folder.resolve() == model.resolve() and find_names(self._source) is not None:
            kind = MTP
        self.method, self.kind_text = method_of(kind), KINDS[kind]
        target = Checkpoint(model)
        self._target = read_decoder_config(target.config, str(target.config_path))
        values: Mapping[str, Any] = {}
        if kind == MTP:
            weights = open_mtp_weights(target, self._target, str(folder))
            values = {HIDDEN_KEY: str(weights.hidden), REFEED_KEY: str(weights.refeed)}
        if kind in _DOUBTFUL:
            read_config, keys = _DOUBTFUL[kind]
            read = read_config(self._source, self._target)
            found = {_TAPS: list(read.reads), _RESIDUAL: read.norm_before_residual, _POST_NORM: read.feeds_normed}
            found[_THETA] = _theta(read)
            values = {key: found[key] for key in keys}
        self.as_is = Reading("as config.json says", values)

    def others(self, key: str, values: Mapping[str, Any]) -> Iterator[Reading]:
        """Yield the other readings of a key, where the others have these values."""
        now = values[key]
        if key == _TAPS:
            for step, text in ((-1, "before"), (1, "after")):
                taps = [layer + step for layer in now]
                if min(taps) >= 0 and max(taps) <= self._target.num_layers:
                    yield Reading(f"rows of the layers {text}: {taps}", {**values, key: taps})
        elif key in _OPTIONS:
            yield from (
                Reading(f"{key} {other}", {**values, key: str(other)}) for other in _OPTIONS[key] if other != now
            )
        elif key == _THETA:
            rope = self._target.attentions[0].rope
            for theta in dict.fromkeys((_THETA_OF_HEADS, *(() if rope is None else (rope.theta,)))):
                if theta != now:
                    yield Reading(f"{key} {theta:g}", {**values, key: theta})
        else:
            yield Reading(f"{key} {json.dumps(not now)}", {**values, key: not now})

    def write(self, reading: Reading, target: Path, *, copies: bool = False) -> None:
        """Write a folder, which exists, with a reading; its other files are links or copies. Raises OSError."""
        for path in self._source.path.iterdir():
            if path.name != "config.json" and path.is_file():
                if copies:
                    shutil.copyfile(path, target / path.name)
                else:
                    (target / path.name).symlink_to(path.resolve())
        (target / "config.json").write_text(json.dumps(self._config(reading), indent=2) + "\n", encoding="utf-8")

    @property
    def num_bytes(self) -> int:
        """What the folder's files take."""
        return sum(path.stat().st_size for path in self._source.path.iterdir() if path.is_file())

    def _config(self, reading: Reading) -> dict[str, Any]:
        config, values = dict(self._source.config), dict(reading.values)
        if not values:
            return config
        if _THETA not in values:
            return config | values
        theta = values.pop(_THETA)
        if isinstance(nested := config.get(_NESTED), Mapping):  # it goes before what the top level says
            config[_NESTED] = {k: v for k, v in nested.items() if k not in (_TAPS, _RESIDUAL, _POST_NORM)}
            config[_NESTED].pop("return_hidden_post_norm", None)
        config.pop("return_hidden_post_norm", None)
        if _LAYERS in config:
            config[_LAYERS] = _with_theta(config[_LAYERS], theta)
        else:
            config = _with_theta(config, theta)
        return config | values


def _theta(read: EagleConfig) -> float:
    rope = read.decoder.attentions[0].rope
    assert rope is not None, "heads are Llama-shaped"
    return rope.theta


def _with_theta(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    maps = {
        key: {**config[key], _THETA: theta}
        for key in _ROPE_MAPS
        if isinstance(config.get(key), Mapping) and _THETA in config[key]
    }
    return {**config, **maps, _THETA: theta}
