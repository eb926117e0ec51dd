"""What is measured on a machine is kept between starts: what it depends on, where it lies, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.device.processors import processor_name
from fastdeploy_sd.device.program.operator_files import cache_folder
from fastdeploy_sd.spec_decode.control.profile import Key


def machine_key(config: Config) -> Key:
    """Return what the times of any model depend on."""
    return {
        "cpu": processor_name(),
        "isa": library.isa(),
        "num_threads": library.num_threads(),
        "ranks": config.parallel.tensor_parallel_size,
    }


def measurements_folder(config: Config) -> Path | None:
    """Return the folder: of the packed weights, else of the user; None = this user has none, as in a container."""
    if config.model.packed_weights_folder is not None:
        return config.model.packed_weights_folder
    try:
        return cache_folder()
    except RuntimeError:
        return None


def keep(path: Path | None, is_steady: bool, save: Callable[[Path], None]) -> str:
    """Let `save` write a file, if that is possible and worth it; returns where it is, or why it is not.

    Args:
        path: of the file; None = there is no folder for it.
        is_steady: whether the machine did nothing else meanwhile.
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
