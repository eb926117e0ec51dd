"""Turns a checkpoint's matrices into packed ones: from the mapped file straight into the form that the kernels stream.

Knows names, formats and bytes; knows no layers, and not whether packed matrices are kept anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import (
    PackedExperts,
    PackedLinear,
    experts_shape,
    pack_experts_into,
    pack_into,
    packed_bytes,
)
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.parallel.ranges import WHOLE, SliceRule
from fastdeploy_sd.runtime.device import device
from fastdeploy_sd.runtime.memory import WeightMemory

Bytes = npt.NDArray[np.uint8]


class PackedStore(Protocol):
    """Where packed matrices may already be."""

    def find(self, name: str, num_bytes: int) -> Bytes | None:
        """Return a packed matrix, 64-byte aligned, or None where there is none of this name and size."""
        ...

    def add(self, name: str, data: Bytes) -> None:
        """Take a freshly packed matrix, which nobody changes any more."""
        ...


class WeightPacker:
    """Packs matrices of one checkpoint on all kernel threads, one matrix after the other.

    A matrix exists once: parts are read where the file is mapped, and its pages are given back when they were read. So
    loading needs the packed size and little more.

    Args:
        store: None = every matrix is packed.
        on_packed: told of every matrix its bytes in the checkpoint and those it takes packed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        store: PackedStore | None = None,
        on_packed: Callable[[int, int], object] = lambda *_: None,
    ) -> None:
        self._checkpoint, self._store, self._memory = checkpoint, store, WeightMemory()
        self._on_packed = on_packed

    def linear(self, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> PackedLinear[Tensor]:
        """Return one packed matrix; `slices` says how the sum over its inputs is cut."""
        out_features, in_features = matrix.shape
        num_bytes = packed_bytes(in_features, out_features, fmt, slices)
        name = f"{fmt}: {matrix.name}"
        if slices.count > 1:
            name += f" in {slices.count} slices of units of {slices.unit}"
        data = self._packed(name, num_bytes, lambda address: pack_into(address, matrix, fmt, slices))
        self._finish([matrix], num_bytes)
        return PackedLinear(device().wrap(data), in_features, out_features, fmt, slices)

    def experts(self, matrices: Sequence[WeightMatrix], fmt: LinearFormat) -> PackedExperts[Tensor]:
        """Return one packed matrix per expert, all of one shape.

        Raises:
            ValueError: no expert, or shapes that differ.
        """
        out_features, in_features = experts_shape(matrices)
        num_bytes = len(matrices) * packed_bytes(in_features, out_features, fmt)
        name = f"{fmt}: {len(matrices)} experts from {matrices[0].name}"
        data = self._packed(name, num_bytes, lambda address: pack_experts_into(address, matrices, fmt))
        self._finish(matrices, num_bytes)
        return PackedExperts(device().wrap(data), len(matrices), in_features, out_features, fmt)

    def _packed(self, name: str, num_bytes: int, pack_to: Callable[[int], None]) -> Bytes:
        found = None if self._store is None else self._store.find(name, num_bytes)
        if found is not None:
            return found
        data = self._memory.take(num_bytes)
        pack_to(data.ctypes.data)
        if self._store is not None:
            self._store.add(name, data)
        return data

    def _finish(self, matrices: Sequence[WeightMatrix], num_packed_bytes: int) -> None:
        self._on_packed(sum(part.data.nbytes for matrix in matrices for part in matrix.parts), num_packed_bytes)
        self._checkpoint.release(part.name for matrix in matrices for part in matrix.parts)
