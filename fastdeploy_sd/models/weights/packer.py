"""Packs a checkpoint's matrices: straight from the mapped file into the layout that the kernels stream.

Knows names, formats and bytes; knows no layers, and not whether packed matrices are kept anywhere.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from paddle import Tensor

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import constant, device
from fastdeploy_sd.device.device_tensor import DeviceTensor
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.float16_range import verify_float16
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.ops.device_packing import pack_groups_on_device, pack_on_device, send_packed
from fastdeploy_sd.ops.group_format import GROUP_FORMATS
from fastdeploy_sd.ops.group_packing import StoredMatrix, in_group_order, kept_format, pack_groups, stored_matrix
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import PackedExperts, PackedLinear, experts_shape, pack_into, packed_bytes
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import Bytes
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Form:
    """What a matrix becomes; `is_exact`: the format holds integers or codes as they are stored."""

    format: LinearFormat
    slices: SliceRule
    is_exact: bool

    @property
    def keeps_integers(self) -> bool:
        return self.is_exact and self.format in GROUP_FORMATS

    def stored(self, matrix: WeightMatrix) -> StoredMatrix | None:
        """Return a matrix as it is stored where it is packed so, None where its numbers are."""
        return stored_matrix(matrix, self.format, self.slices, keeps_integers=self.keeps_integers)

    def name_of(self, matrix: str) -> str:
        """Return what a store calls a matrix in this form."""
        return f"{'integers as ' if self.keeps_integers else ''}{self.format}: {matrix}"


class WeightPacker:
    """Packs matrices of one source one after the other: on all kernel threads, or on the GPU that they are for.

    A matrix exists once: parts are read where the file is mapped, and their pages are given back after that. So loading
    needs memory for the packed weights and little more; for a GPU the host needs only the buffer of the uploads. What
    is not stored as numbers becomes float32, one matrix at a time, unless its codes are packed. `on_packed` gets the
    bytes of every matrix in the source and packed.
    `spread_store`: of experts that are spread over ranks, in place of `store`.
    `keeps_integers`: what is stored as integers or as e4m3 is multiplied as such (`kept_format`).
    """

    def __init__(
        self,
        source: WeightSource,
        store: PackedMatrices | None = None,
        on_packed: Callable[[int, int], object] = lambda *_: None,
        keeps_integers: bool = False,
        spread_store: PackedMatrices | None = None,
    ) -> None:
        self._source, self._store, self._memory = source, store, WeightMemory()
        self._spread_store = spread_store
        self._on_packed, self.keeps_integers = on_packed, keeps_integers
        self._kept_bytes: dict[LinearFormat, list[int]] = {}
        self._made: dict[str, Tensor] = {}

    def linear(self, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> PackedLinear[Tensor]:
        """Return one packed matrix; `slices` says how the sum over its inputs is cut.

        Raises CheckpointError: `fmt` is float16, which cannot hold the matrix's numbers.
        """
        order = None
        if self.keeps_integers:
            matrix, slices, inputs = in_group_order(matrix, slices)
            order = None if inputs is None else constant(inputs)
        out_features, in_features = matrix.shape
        form, name = self._form([matrix], fmt, slices), matrix.name
        if slices.count > 1:
            name += f" in {slices.count} slices of units of {slices.unit}"
        if order is not None:
            name += ", inputs by their groups"
        data = self._packed(name, [matrix], form, self._store)
        return PackedLinear(data, in_features, out_features, form.format, slices, order)

    def integers(self, matrix: WeightMatrix) -> PackedLinear[Tensor] | None:
        """Return a matrix packed for `gather_weight_rows`, None where it does not stay integers."""
        form = self._form([matrix], "float32", WHOLE)
        return self.linear(matrix, form.format) if form.keeps_integers else None

    def experts(
        self, matrices: Sequence[WeightMatrix], fmt: LinearFormat, *, are_spread: bool = False, may_move: bool = False
    ) -> PackedExperts[Tensor]:
        """Return one packed matrix per expert, all of one shape; `are_spread`: any of a layer, in any order.

        `may_move`: `pack_expert` writes others over them, so on a processor memory has a copy of what a file holds.

        Raises ValueError: no expert, or shapes that differ; CheckpointError: as `linear`.
        """
        out_features, in_features = experts_shape(matrices)
        form = self._form(matrices, fmt, WHOLE)
        if may_move:
            data = self._movable(matrices, form)
            return PackedExperts(data, len(matrices), in_features, out_features, form.format)
        name, store = f"{len(matrices)} experts from {matrices[0].name}", self._store
        if are_spread:
            names = "\0".join(matrix.name for matrix in matrices)
            name += f", {hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
            store = self._spread_store
        data = self._packed(name, matrices, form, store)
        return PackedExperts(data, len(matrices), in_features, out_features, form.format)

    def pack_expert(self, matrix: WeightMatrix, fmt: LinearFormat, like: PackedExperts[Tensor], address: int) -> None:
        """Pack an expert again to an address, to the bytes that `experts` makes of it for a layer.

        Any thread may call it; see Device.overwrite.

        Raises ValueError: it would have another format than the layer's experts.
        """
        form = self._form([matrix], fmt, WHOLE)
        if form.format != like.format:
            raise ValueError(f"{matrix.name}: expected the format of the layer's experts, got {form.format}")
        device().overwrite(address, like.expert_bytes, lambda data: self._pack_expert(data, matrix, form))

    def _movable(self, matrices: Sequence[WeightMatrix], form: _Form) -> Tensor:
        """Return matrices one after the other, each kept in the store by itself: a later start may have others."""
        out_features, in_features = matrices[0].shape
        size, where = packed_bytes(in_features, out_features, form.format, form.slices), device()
        if isinstance(where, CudaDevice):
            tensor = where.empty((len(matrices) * size,), np.uint8)
            for i, matrix in enumerate(matrices):
                self._pack_expert_on_device(where, tensor[i * size : (i + 1) * size], matrix, form)
            packed = cast("Tensor", tensor)
        else:
            data = self._memory.take(len(matrices) * size)
            for i, matrix in enumerate(matrices):
                self._pack_expert(data[i * size : (i + 1) * size], matrix, form, is_loading=True)
            packed = where.wrap(data)
        self._note_packed(matrices, form, len(matrices) * size)
        return packed

    def _pack_expert_on_device(self, where: CudaDevice, place: DeviceTensor, matrix: WeightMatrix, form: _Form) -> None:
        """As `_pack_expert`, while the model is loaded."""
        name, store = form.name_of(f"expert {matrix.name}"), self._spread_store
        found = None if store is None else store.find(name, place.num_bytes)
        if found is not None:
            send_packed(where, place.address, found)
            return
        _pack_on_device(where, place.address, matrix, form)
        if store is not None:
            store.add(name, lambda: where.read(place))

    def _pack_expert(self, data: Bytes, matrix: WeightMatrix, form: _Form, *, is_loading: bool = False) -> None:
        """Write an expert's matrix, from the store if that has it. While the model is loaded the store gets it."""
        name, store = form.name_of(f"expert {matrix.name}"), self._spread_store
        found = None if store is None else store.find(name, data.nbytes)
        if found is not None:
            data[:] = found
            return
        _pack_into(data, matrix, form)
        self._source.release(part_name for part in matrix.parts for part_name in part.tensors)
        if store is not None and is_loading:
            store.add(name, lambda: data)  # not to be found: it is written over later

    def log_kept(self) -> None:
        """Log in which formats integers and e4m3 of the source were kept, and what that takes."""
        for fmt, (stored, kept, count) in self._kept_bytes.items():
            megabytes = kept / 1e6, stored / 1e6
            _log.info(
                "%d matrices keep the files' numbers in format %s: %.1f MB, in the files %.1f", count, fmt, *megabytes
            )

    def _form(self, matrices: Sequence[WeightMatrix], fmt: LinearFormat, slices: SliceRule) -> _Form:
        on_gpu = isinstance(device(), CudaDevice)
        kept = kept_format(matrices, fmt, slices, on_gpu=on_gpu) if self.keeps_integers else None
        return _Form(kept or fmt, slices, is_exact=kept is not None)

    def _packed(self, name: str, matrices: Sequence[WeightMatrix], form: _Form, store: PackedMatrices | None) -> Tensor:
        """Return matrices of one shape, one after the other."""
        out_features, in_features = matrices[0].shape
        size = packed_bytes(in_features, out_features, form.format, form.slices)
        num_bytes = len(matrices) * size
        name = form.name_of(name)
        if name in self._made:  # a tied head has the embedding's matrix
            return self._made[name]
        found = None if store is None else store.find(name, num_bytes)
        data = self._newly_packed(name, size, matrices, form, store) if found is None else device().wrap(found)
        self._note_packed(matrices, form, num_bytes)
        self._made[name] = data
        return data

    def _note_packed(self, matrices: Sequence[WeightMatrix], form: _Form, num_bytes: int) -> None:
        """Count matrices that are in memory, and give their pages in the source back."""
        stored = sum(part.num_bytes for matrix in matrices for part in matrix.parts)
        self._on_packed(stored, num_bytes)
        if form.is_exact:
            sizes = self._kept_bytes.setdefault(form.format, [0, 0, 0])
            for i, number in enumerate((stored, num_bytes, len(matrices))):
                sizes[i] += number
        self._source.release(name for matrix in matrices for part in matrix.parts for name in part.tensors)

    def _newly_packed(
        self, name: str, size: int, matrices: Sequence[WeightMatrix], form: _Form, store: PackedMatrices | None
    ) -> Tensor:
        where, num_bytes = device(), len(matrices) * size
        if isinstance(where, CudaDevice):
            tensor = where.empty((num_bytes,), np.uint8)
            for i, matrix in enumerate(matrices):
                _pack_on_device(where, tensor.address + i * size, matrix, form)
            if store is not None:
                store.add(name, lambda: where.read(tensor))
            return cast("Tensor", tensor)
        data = (self._memory if store is None else store).take(num_bytes)
        for i, matrix in enumerate(matrices):
            _pack_into(data[i * size : (i + 1) * size], matrix, form)
        if store is not None:
            store.add(name, data)
        return where.wrap(data)


def _pack_on_device(where: CudaDevice, address: int, matrix: WeightMatrix, form: _Form) -> None:
    if (stored := form.stored(matrix)) is not None:
        pack_groups_on_device(where, address, stored)
    else:
        pack_on_device(where, address, _numbers(matrix, form.format), form.format, form.slices)


def _pack_into(data: Bytes, matrix: WeightMatrix, form: _Form) -> None:
    if (stored := form.stored(matrix)) is not None:
        pack_groups(stored, data)
    else:
        pack_into(data.ctypes.data, _numbers(matrix, form.format), form.format, form.slices)


def _numbers(matrix: WeightMatrix, fmt: LinearFormat) -> WeightMatrix:
    """Return a matrix as numbers that the format can hold."""
    numbers = matrix.numbers()
    if fmt == "float16":
        for part in numbers.float_parts():
            verify_float16(part)
    return numbers
