"""A directory that counts as a checkpoint, and a way to write a YAML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Path of a directory with a config.json, which is all that the configuration looks at."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "server.yaml"
        path.write_text(text)
        return str(path)

    return write
