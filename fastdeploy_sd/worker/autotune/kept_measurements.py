"""Files that keep measurements of a machine between starts: their key, folder and format."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.device.processors import processor_name
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.process.files import read_json, replacing
from fastdeploy_sd.spec_decode.control.profile import Key
from fastdeploy_sd.types.folders import cache_folder

_log = logging.getLogger(__name__)


def machine_key(config: Config) -> Key:
    """Return what the times of any model depend on; several engines share the memory's bandwidth."""
    engines = config.parallel.engines_on_host
    key: dict[str, str | int] = {
        "cpu": processor_name(),
        "isa": library.isa(),
        "num_threads": library.num_threads(),
        "ranks": config.parallel.tensor_parallel_size,
    }
    return key | {"engines": engines} if engines > 1 else key


def measurements_folder(config: Config) -> Path | None:
    """Return the folder of the packed weights, else the user's; None = this user has none, as in a container."""
    if config.model.packed_weights_folder is not None:
        return config.model.packed_weights_folder
    try:
        return cache_folder()
    except RuntimeError:
        return None


def keep(path: Path | None, is_steady: bool, save: Callable[[Path], None]) -> str:
    """Let `save` write a file, if that is possible and worth it; returns its place, or why it was not kept.

    Args:
        path: of the file; None = it has no folder.
        is_steady: whether the measurement is worth keeping: the machine was quiet.
    """
    if not is_steady:
        return "not kept, as something else runs on this machine"
    if path is None:
        return "not kept, as this user has no home folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
    except OSError as error:
        return f"not kept: {error}"
    return str(path)


def load_json(path: Path, about: Mapping[str, Any], again: str) -> dict[str, Any] | None:
    """Return the values of a file for the key `about`; None = no such file. `again` begins a warning."""
    try:
        values = read_json(path, missing_ok=True)
    except CheckpointError as error:
        _log.warning("%s: %s", again, error)
        return None
    return values if all(values.get(key) == value for key, value in about.items()) else None


def save_json(values: Mapping[str, Any], path: Path) -> None:
    """Write a file for `load_json`; raises OSError."""
    with replacing(path) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())
