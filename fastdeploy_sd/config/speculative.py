"""Reads `speculative_config`, a map or its JSON text, strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.config.sections import SpeculativeConfig
from fastdeploy_sd.config.unsupported import UNSUPPORTED_SPECULATIVE, rejection
from fastdeploy_sd.errors import ConfigError, suggest

_NAME = "speculative_config"
_METHODS = ("naive",)
# FastDeploy's methods and its alias, so that the error can say "not supported yet".
_KNOWN_METHODS = ("naive", "ngram", "ngram_match", "mtp", "suffix")
_KEYS = ("method", "num_speculative_tokens")


def read_speculative(value: object) -> SpeculativeConfig:
    """Return the configuration that `value` describes; None is plain decoding.

    Raises:
        ConfigError: no map or JSON object, an unknown key or method, or one that is not supported yet.
    """
    if value is None:
        return SpeculativeConfig()
    given = {str(k).replace("-", "_"): v for k, v in _read_map(value).items()}
    for key, item in given.items():
        _verify_key(key, item)
    method = given.get("method")
    if method is None:
        raise ConfigError(f"{_NAME}.method: expected one of {', '.join(_METHODS)}, got nothing", param=_NAME)
    return SpeculativeConfig(_read_method(method), _read_num_tokens(given.get("num_speculative_tokens", 0)))


def _read_map(value: object) -> Mapping[Any, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{_NAME}: expected a JSON object, got text that is none: {error}", param=_NAME) from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_NAME}: expected a map, got {value!r}", param=_NAME)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ConfigError(f"{_NAME}: expected every key once, got {[key for key, _ in pairs]}", param=_NAME)
    return result


def _verify_key(key: str, value: object) -> None:
    if key in _KEYS:
        return
    if key not in UNSUPPORTED_SPECULATIVE:
        hint = suggest(key, [*_KEYS, *UNSUPPORTED_SPECULATIVE])
        raise ConfigError(f"{_NAME}.{key}: unknown key{hint}", param=_NAME)
    reason = rejection(key, value, UNSUPPORTED_SPECULATIVE[key])
    if reason is not None:
        raise ConfigError(f"{_NAME}.{reason}", param=_NAME)


def _read_method(value: object) -> str:
    name = value.lower() if isinstance(value, str) else ""
    if name in _METHODS:
        return name
    known = "not supported yet in this version" if name in _KNOWN_METHODS else "not a method"
    hint = "" if name in _KNOWN_METHODS else suggest(name, _KNOWN_METHODS)
    raise ConfigError(
        f"{_NAME}.method: expected one of {', '.join(_METHODS)}, got {value!r}, which is {known}{hint}", param=_NAME
    )


def _read_num_tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value != 0:
        raise ConfigError(
            f"{_NAME}.num_speculative_tokens: expected 0, as method naive makes no drafts, got {value!r}", param=_NAME
        )
    return value
