"""Turns a checkpoint's matrices into packed ones: from the mapped file straight into the form that the kernels stream.

Knows names, formats and bytes; knows no layers, and not whether packed matrices are kept anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.float16_range import verify_float16
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.ops.code_packing import pack_codes
from fastdeploy_sd.ops.device_packing import pack_on_device, send_packed
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import PackedExperts, PackedLinear, experts_shape, pack_into, packed_bytes
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.types.ranges import WHOLE, SliceRule


class PackedStore(Protocol):
    """Where packed matrices may already be."""

    def find(self, name: str, num_bytes: int) -> Bytes | None:
        """Return a packed matrix, 64-byte aligned, or None where there is none of this name and size."""
        ...

    def add(self, name: str, data: Bytes | Callable[[], Bytes]) -> None:
        """Take a freshly packed matrix, which nobody changes any more, or what reads it from where it is."""
        ...


class WeightPacker:
    """Packs matrices of one checkpoint one after the other: on all kernel threads, or on the GPU that they are for.

    A matrix exists once: parts are read where the file is mapped, and its pages are given back when they were read. So
    loading needs the packed size and little more; of the host's memory, where the model is on a GPU, only what weights
    go up through. Other storages than numbers become float32, a matrix at a time, unless their codes are packed.

    Args:
        store: None = every matrix is packed.
        on_packed: told of every matrix its bytes in the checkpoint and those it takes packed.
    """

    def __init__(
        self,
        source: WeightSource,
        store: PackedStore | None = None,
        on_packed: Callable[[int, int], object] = lambda *_: None,
    ) -> None:
        self._source, self._store, self._memory = source, store, WeightMemory()
        self._on_packed = on_packed

    def linear(self, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> PackedLinear[Tensor]:
        """Return one packed matrix; `slices` says how the sum over its inputs is cut.

        Raises:
            CheckpointError: `fmt` is float16, which cannot hold the matrix's numbers.
        """
        out_features, in_features = matrix.shape
        name = f"{fmt}: {matrix.name}"
        if slices.count > 1:
            name += f" in {slices.count} slices of units of {slices.unit}"
        data = self._packed(name, [matrix], fmt, slices)
        return PackedLinear(data, in_features, out_features, fmt, slices)

    def experts(self, matrices: Sequence[WeightMatrix], fmt: LinearFormat) -> PackedExperts[Tensor]:
        """Return one packed matrix per expert, all of one shape.

        Raises:
            ValueError: no expert, or shapes that differ.
            CheckpointError: as `linear`.
        """
        out_features, in_features = experts_shape(matrices)
        data = self._packed(f"{fmt}: {len(matrices)} experts from {matrices[0].name}", matrices, fmt, WHOLE)
        return PackedExperts(data, len(matrices), in_features, out_features, fmt)

    def _packed(self, name: str, matrices: Sequence[WeightMatrix], fmt: LinearFormat, slices: SliceRule) -> Tensor:
        """Return matrices of one shape, one behind the other."""
        out_features, in_features = matrices[0].shape
        size = packed_bytes(in_features, out_features, fmt, slices)
        num_bytes = len(matrices) * size
        found = None if self._store is None else self._store.find(name, num_bytes)
        if found is not None:
            data = device().wrap(found)
        else:
            data = self._newly_packed(name, num_bytes, size, matrices, fmt, slices)
        self._on_packed(sum(part.num_bytes for matrix in matrices for part in matrix.parts), num_bytes)
        self._source.release(name for matrix in matrices for part in matrix.parts for name in part.tensors)
        return data

    def _newly_packed(
        self,
        name: str,
        num_bytes: int,
        size: int,
        matrices: Sequence[WeightMatrix],
        fmt: LinearFormat,
        slices: SliceRule,
    ) -> Tensor:
        where = device()
        if isinstance(where, CudaDevice):
            tensor = where.empty((num_bytes,), np.uint8)
            for i, matrix in enumerate(matrices):
                codes = pack_codes(matrix, fmt, slices)
                if codes is not None:
                    send_packed(where, tensor.address + i * size, codes)
                else:
                    pack_on_device(where, tensor.address + i * size, _numbers(matrix, fmt), fmt, slices)
            if self._store is not None:
                self._store.add(name, lambda: where.read(tensor))
            return cast("Tensor", tensor)
        data = self._memory.take(num_bytes)
        for i, matrix in enumerate(matrices):
            codes = pack_codes(matrix, fmt, slices)
            if codes is not None:
                data[i * size : (i + 1) * size] = codes
            else:
                pack_into(data.ctypes.data + i * size, _numbers(matrix, fmt), fmt, slices)
        if self._store is not None:
            self._store.add(name, data)
        return where.wrap(data)


def _numbers(matrix: WeightMatrix, fmt: LinearFormat) -> WeightMatrix:
    """Return a matrix as numbers, which the format can hold."""
    parts = matrix.float_parts()
    if fmt == "float16":
        for part in parts:
            verify_float16(part)
    return WeightMatrix(parts)
