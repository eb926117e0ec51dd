"""Reads what a checkpoint recommends for requests: the sampling options in its generation_config.json."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdeploy_sd.config import OVERRIDE_OPTION, GenerationValues
from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError
from fastdeploy_sd.process.files import read_json
from fastdeploy_sd.sampling_params import SamplingParams, verified

FILE = "generation_config.json"
# Values of the option that are no folder.
OF_CHECKPOINT, NONE = "auto", "vllm"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_TOKENS = "max_new_tokens"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Values for what a request leaves open.

    Attributes:
        sampling: fields of SamplingParams.
        max_tokens: the most tokens of an output, where that many fit; None = all that fit.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def __str__(self) -> str:
        values = {**self.sampling, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}
        return ", ".join(f"{name} {value:g}" for name, value in values.items())

    def params(self, num_free_tokens: int) -> SamplingParams:
        """Return the options of a request that names none and for whose output so many tokens are free."""
        max_tokens = None if self.max_tokens is None else min(self.max_tokens, max(num_free_tokens, 1))
        return SamplingParams.from_dict({**self.sampling, "max_tokens": max_tokens})


@functools.cache
def read_request_defaults(source: str, checkpoint: Path, override: GenerationValues | None = None) -> RequestDefaults:
    """Return the defaults of a source: `auto` = the checkpoint, `vllm` = none, or a folder. A file is read once.

    `override`: values in place of the source's.

    Raises:
        ConfigError: the folder has no such file, or a value of `override` is out of range.
        CheckpointError: the file is malformed, or a value is out of range.
    """
    found = _read_file(source, checkpoint)
    if override is None:
        return found
    given = {name: _overriding(name, value) for name, value in override.to_map().items()}
    max_tokens = given.pop(_MAX_TOKENS, found.max_tokens)
    return RequestDefaults({**found.sampling, **given}, max_tokens)


def _overriding(key: str, value: object) -> Any:
    name = "max_tokens" if key == _MAX_TOKENS else key
    try:
        return verified(name, value)
    except BadRequest as error:
        text = f"{OVERRIDE_OPTION}.{key}{error.message.removeprefix(name)}"
        raise ConfigError(text, param=OVERRIDE_OPTION) from None


def _read_file(source: str, checkpoint: Path) -> RequestDefaults:
    if source == NONE:
        return RequestDefaults()
    path = (checkpoint if source == OF_CHECKPOINT else Path(source)) / FILE
    if source != OF_CHECKPOINT and not path.is_file():
        raise ConfigError(
            f"generation_config: expected {OF_CHECKPOINT}, {NONE} or a folder with {FILE}, got {source!r}",
            param="generation_config",
        )
    values = read_json(path, missing_ok=True)
    sampling = {name: _value(path, name, name, values[name]) for name in _SAMPLING if values.get(name) is not None}
    limit = values.get(_MAX_TOKENS)
    return RequestDefaults(sampling, None if limit is None else _value(path, _MAX_TOKENS, "max_tokens", limit))


def _value(path: Path, key: str, name: str, value: object) -> Any:
    try:
        return verified(name, value)
    except BadRequest as error:
        raise CheckpointError(f"{path}: {key}{error.message.removeprefix(name)}") from None


def describe_defaults(source: str, checkpoint: Path, override: GenerationValues | None = None) -> str:
    """Return a line for the log of a start; arguments and errors as for read_request_defaults."""
    text = str(read_request_defaults(source, checkpoint, override))
    if not text:
        return "defaults of requests: OpenAI's"
    file = FILE if source == OF_CHECKPOINT else f"{source}/{FILE}"
    places = [*([] if source == NONE else [file]), *([] if override is None else [OVERRIDE_OPTION])]
    whose = "them" if override is None else "the file's"
    hint = "" if source == NONE else f"; --generation-config {NONE} is without {whose}"
    return f"defaults of requests: {text}, from {' and '.join(places)}{hint}"


def logged_defaults(source: str, checkpoint: Path, override: GenerationValues | None = None) -> RequestDefaults:
    """Return the defaults and log them, for a program without a server."""
    _log.info("%s", describe_defaults(source, checkpoint, override))
    return read_request_defaults(source, checkpoint, override)
