"""The metadata of a GGUF file that its architecture has keys for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.gguf.container import GgufFile


class Metadata:
    """Typed access to the keys of a file's architecture.

    Raises (on construction):
        CheckpointError: the architecture is not one of those that are served.
    """

    def __init__(self, file: GgufFile, served: Collection[str]) -> None:
        self.file, self.values = file, file.metadata
        architecture = self.values.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in served:
            expected = f"one of {', '.join(served)}"
            raise CheckpointError(f"{file.path}: general.architecture: expected {expected}, got {shown(architecture)}")
        self.architecture = architecture

    def get(self, key: str) -> Any:
        """Return a value of the architecture, None where there is none."""
        return self.values.get(f"{self.architecture}.{key}")

    def integer(self, key: str) -> int:
        """Return a whole number above 0; raises CheckpointError where there is none."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = f"{self.architecture}.{key}"
            raise CheckpointError(f"{self.file.path}: {name}: expected a whole number above 0, got {shown(value)}")
        return value
