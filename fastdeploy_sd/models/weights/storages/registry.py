"""Which storages are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages.awq import Awq
from fastdeploy_sd.models.weights.storages.compressed_tensors import CompressedTensors
from fastdeploy_sd.models.weights.storages.float8 import Float8
from fastdeploy_sd.models.weights.storages.floats import Floats
from fastdeploy_sd.models.weights.storages.gguf import GgufBlocks
from fastdeploy_sd.models.weights.storages.gptq import Gptq
from fastdeploy_sd.models.weights.storages.ordered_columns import OrderedColumns
from fastdeploy_sd.models.weights.storages.stacked_experts import StackedExperts
from fastdeploy_sd.ops.weight_matrix import WeightPart


class Storage(Protocol):
    """A way to store weight matrices: which tensors are one weight, and how they are read. Logs say its name."""

    name: str

    def described(self, where: str, description: Mapping[str, Any]) -> Storage | None:
        """Return the storage that a checkpoint's description of its quantised weights means, None = another one.

        Raises CheckpointError: a variant that is not read.
        """
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
STORAGES: tuple[Storage, ...] = (Float8(), GgufBlocks(), StackedExperts(), Floats())
# Those that a checkpoint has only if it says so.
DESCRIBED: tuple[Storage, ...] = (Awq(), Gptq(), CompressedTensors())


def described_storage(where: str, description: Mapping[str, Any]) -> Storage | None:
    """Return the storage that a description means, None where it is none of them; raises as Storage.described."""
    storages = (storage.described(where, description) for storage in (*DESCRIBED, *STORAGES))
    return next((storage for storage in storages if storage is not None), None)


def has_weight(source: WeightSource, weight: str) -> bool:
    return any(storage.holds(source, weight) for storage in _storages(source))


def read_weight(source: WeightSource, weight: str, shape: tuple[int, int]) -> WeightPart:
    """Return a weight [N, K], in place; raises as Storage.read."""
    storages = _storages(source)
    storage = next((storage for storage in storages if storage.holds(source, weight)), storages[-1])
    part, columns = storage.read(source, weight, shape), source.columns(f"{weight}.weight")
    return OrderedColumns.of(part, columns) if columns else part


def _storages(source: WeightSource) -> tuple[Storage, ...]:
    return (*source.storages, *STORAGES)
