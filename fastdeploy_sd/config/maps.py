"""Reads an option that is a map, or its JSON text: every key once, and none that has no effect. Knows no option."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fastdeploy_sd.config.unsupported import rejection
from fastdeploy_sd.errors import ConfigError, shown, suggest


def read_map(option: str, value: object) -> dict[str, Any]:
    """Return the keys, with underscores for dashes, and values of a map, as `read_object`."""
    items = read_object(option, value).items()
    return _unique(option, [(key.replace("-", "_"), item) for key, item in items])


def read_object(option: str, value: object) -> dict[str, Any]:
    """Return the keys and values of a map or of a JSON object's text.

    Raises ConfigError: it is neither, or a key is repeated; the text names `option`.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=lambda pairs: _unique(option, pairs))
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:  # of the syntax, or a number with too many digits
            text = f"{option}: expected a JSON object, got text that is none: {error}"
            raise ConfigError(text, param=option) from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{option}: expected a map, got {shown(value)}", param=option)
    return _unique(option, [(str(key), item) for key, item in value.items()])


def has_meaning(
    option: str, key: str, value: object, known: Iterable[str], unsupported: Mapping[str, tuple[object, ...]]
) -> bool:
    """Return whether a key of an option's map is one of `known`; False for one that asks for nothing.

    `unsupported`: keys that are not supported yet -> their values that ask for nothing. Raises ConfigError: an unknown
    key, or an unsupported one with another value.
    """
    names = tuple(known)
    if key in names:
        return True
    if key not in unsupported:
        raise ConfigError(f"{option}.{key}: unknown key{suggest(key, [*names, *unsupported])}", param=option)
    reason = rejection(key, value, unsupported[key])
    if reason is not None:
        raise ConfigError(f"{option}.{reason}", param=option)
    return False


def _unique(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ConfigError(f"{option}: expected every key once, got {[key for key, _ in pairs]}", param=option)
    return result
