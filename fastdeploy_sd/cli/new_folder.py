"""Folders that a command makes: whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastdeploy_sd.errors import ConfigError


def verify_new(target: Path) -> None:
    """Raise ConfigError where there is something already."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"target: expected a folder that does not exist yet, got {str(target)!r}")


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[None]:
    """Make a folder that has room for so many bytes, and remove it again if the block fails.

    Raises ConfigError: it cannot be made or written, or there is too little room.
    """
    try:
        free = shutil.disk_usage(target.absolute().parent).free
        if free < num_bytes:
            raise ConfigError(f"target: expected room for {num_bytes} bytes, got {free} in {target.absolute().parent}")
        target.mkdir()
    except OSError as error:
        raise ConfigError(f"target: expected a place for a new folder: {error}") from error
    try:
        yield
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"target: expected a folder that can be written: {error}") from error
        raise
