"""Which storages are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages.float8_blocks import Float8Blocks
from fastdeploy_sd.models.weights.storages.floats import Floats
from fastdeploy_sd.models.weights.storages.gguf import GgufBlocks
from fastdeploy_sd.ops.weight_matrix import WeightPart


class Storage(Protocol):
    """A way to store weight matrices: which tensors are one weight, and how they are read. Logs say its name."""

    name: str

    def describes(self, description: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's description of its quantised weights means this storage."""
        ...

    def holds(self, source: WeightSource, weight: str) -> bool:
        """Whether a source has a weight, named without `.weight`, in this storage."""
        ...

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> WeightPart:
        """Return a weight [N, K], in place.

        Raises CheckpointError: a tensor is missing, has another shape or type, or holds what it may not.
        """
        ...


# The first that holds a weight reads it. The last one reads, and names, what none holds.
STORAGES: tuple[Storage, ...] = (Float8Blocks(), GgufBlocks(), Floats())


def described_storage(description: Mapping[str, Any]) -> Storage | None:
    """Return the storage that a description means, None where it is none of them."""
    return next((storage for storage in STORAGES if storage.describes(description)), None)


def has_weight(source: WeightSource, weight: str) -> bool:
    return any(storage.holds(source, weight) for storage in STORAGES)


def read_weight(source: WeightSource, weight: str, shape: tuple[int, int]) -> WeightPart:
    """Return a weight [N, K], in place; raises as Storage.read."""
    storage = next((storage for storage in STORAGES if storage.holds(source, weight)), STORAGES[-1])
    return storage.read(source, weight, shape)
