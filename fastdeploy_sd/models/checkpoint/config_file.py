"""Reads config.json of a checkpoint's folder, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint.quantization import verify_unquantized
from fastdeploy_sd.process.files import read_json

CONFIG_NAME = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint whose weights can be read.

    Raises:
        CheckpointError: no such folder, no readable config.json, or quantised weights.
    """
    if not folder.is_dir():
        raise CheckpointError(f"model: expected a checkpoint directory, got {str(folder)!r}", param="model")
    config = read_json(folder / CONFIG_NAME)
    verify_unquantized(folder, config)
    return config
