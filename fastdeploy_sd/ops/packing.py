"""Packs weight matrices into the layout that `linear` and `moe_ffn` stream. Knows no framework."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.arrays import Array
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import CParams, call, returned
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types import U8
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

A = TypeVar("A")
# fdsd::WeightDType.
_WEIGHT_DTYPE_CODES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}
GROUP, _PANEL, _WORD = 128, 32, 4
# Formats with codes, and that of the number 0. custom_ops/cpu/kernels/linear_layout.h says how they are packed: panels
# of 32 outputs, in each groups of at most 128 inputs, and their scales. Two of wint4 lie in a byte, after them the
# factors of each 16 inputs.
CODE_ZEROS: Mapping[LinearFormat, int] = {"fp8": 0, "e4m3": 0, "wint8": 128, "wint4": 0}
FACTOR_INPUTS = 16
_FACTORS = GROUP // FACTOR_INPUTS


@dataclass(frozen=True)
class PackedLinear(Generic[A]):
    """A weight matrix in the layout the kernel streams.

    Attributes:
        data: u8[packed_bytes(...)], 64-byte aligned; the same on every instruction-set level.
        slices: how `linear` cuts its sums. Where slices begin at multiples of 128, `data` is the same without any.
        order: i32[in_features], which input each column of the matrix multiplies, -1 = none; None: in order.
    """

    data: A
    in_features: int
    out_features: int
    format: LinearFormat
    slices: SliceRule = WHOLE
    order: A | None = None


def packed_bytes(in_features: int, out_features: int, fmt: LinearFormat, slices: SliceRule = WHOLE) -> int:
    """Return the size of a packed [out_features, in_features] matrix; a multiple of 64."""
    sizes = in_features, out_features, format_code(fmt), slices.count, slices.unit
    return int(returned("packed_linear_bytes", ctypes.c_int64, *sizes))


def as_matrix(weight: Array | WeightMatrix) -> WeightMatrix:
    return weight if isinstance(weight, WeightMatrix) else WeightMatrix.whole(weight)


def pack_into(address: int, weight: Array | WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> None:
    """Pack a matrix into `packed_bytes` bytes of memory at a 64-byte aligned address.

    Args:
        weight: f32, f16 or bf16 (u16 bits) [N, K], or parts of it. Parts that are numbers are read in place: views of
            larger matrices, whose rows are contiguous; may be read-only memory maps.

    Raises ValueError: unknown format, or a shape, dtype or the alignment disagrees.
    """
    matrix = as_matrix(weight)
    rows: type[Any] = struct_type("WeightRows")
    numbers = matrix.float_parts()  # alive until they are packed
    parts = (rows * len(numbers))(*map(weight_rows, numbers))
    call("pack_linear", pack_params(address, matrix, fmt, slices, ctypes.addressof(parts)))


def pack_params(address: int, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule, parts: int) -> CParams:
    """Return PackLinearParams over the addresses of the packed matrix and of its parts' `weight_rows`."""
    out_features, in_features = matrix.shape
    return struct_type("PackLinearParams")(
        in_features=in_features,
        out_features=out_features,
        format=format_code(fmt),
        num_slices=slices.count,
        slice_unit=slices.unit,
        num_parts=len(matrix.parts),
        parts=parts,
        packed=address,
    )


def weight_rows(part: FloatPart, address: int | None = None) -> CParams:
    """Return WeightRows; `address` is that of the same elements elsewhere, None = they are read where they are.

    Raises ValueError: of another type than weights have, or rows that are not contiguous.
    """
    data = part.data
    if data.dtype not in _WEIGHT_DTYPE_CODES:
        raise ValueError(f"weight: expected float32, float16 or bfloat16 (as uint16), got {data.dtype}")
    return struct_type("WeightRows")(
        data=data.ctypes.data if address is None else address,
        stride=_row_stride(data) if address is None else data.shape[1],
        num_rows=part.shape[0],
        dtype=_WEIGHT_DTYPE_CODES[data.dtype],
        is_transposed=part.is_transposed,
    )


def _row_stride(data: Array) -> int:
    """Return the elements from one row to the next; raises ValueError when the rows are not contiguous."""
    width: int = data.shape[1]
    row, element = data.strides
    if data.flags.c_contiguous:  # the strides of dimensions with one element mean nothing
        return width
    if element != data.itemsize or row % data.itemsize or row < width * data.itemsize:
        raise ValueError(f"weight: expected contiguous rows of {data.dtype}, got strides {list(data.strides)}")
    return int(row) // data.itemsize


def pack_linear(
    weight: Array | WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE
) -> PackedLinear[npt.NDArray[np.uint8]]:
    """Quantise and reorder a weight matrix for `linear`, as `reference.linear.stored_weight` says; see `pack_into`."""
    matrix = as_matrix(weight)
    out_features, in_features = matrix.shape
    data = WeightMemory().take(packed_bytes(in_features, out_features, fmt, slices))
    pack_into(data.ctypes.data, matrix, fmt, slices)
    return PackedLinear(data, in_features, out_features, fmt, slices)


def input_groups(num_columns: int, slices: SliceRule) -> list[range]:
    """Return the inputs that share a scale, group by group: at most 128 of one slice."""
    return [
        range(begin, min(begin + GROUP, piece.stop))
        for piece in slices.ranges(num_columns)
        for begin in range(piece.start, piece.stop, GROUP)
    ]


def unpack_codes(packed: PackedLinear[npt.NDArray[np.uint8]]) -> tuple[U8, npt.NDArray[np.float32], U8]:
    """Return codes, scales and zeros [N, K] of a matrix in wint8 or wint4: its numbers are (code - zero) * scale."""
    groups = input_groups(packed.in_features, packed.slices)
    units = packed.data.reshape(-(-packed.out_features // _PANEL), len(groups), -1)
    words, scales = np.split(units, [units.shape[2] - 4 * _PANEL], axis=2)

    def by_input(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[panels, groups, n, columns, inputs] as [N, K]."""
        padded = values.transpose(0, 3, 1, 2, 4).reshape(-1, len(groups), GROUP)[: packed.out_features]
        return np.concatenate([padded[:, g, : len(group)] for g, group in enumerate(groups)], axis=1)

    places = words.shape[:2]
    by_unit = np.ascontiguousarray(scales).view(np.float32)[:, :, None, :, None]
    if packed.format != "wint4":
        codes = by_input(words.reshape(*places, GROUP // _WORD, _PANEL, _WORD))
        zeros = np.full_like(codes, CODE_ZEROS[packed.format])
        return codes, by_input(np.repeat(by_unit, GROUP, axis=4)), zeros
    words, factors = np.split(words, [_PANEL * GROUP // 2], axis=2)
    steps = words.reshape(*places, GROUP // _WORD, _PANEL // 2, _WORD)
    codes = by_input(np.concatenate([steps & 15, steps >> 4], axis=3))
    by_factor = np.repeat(factors.reshape(*places, _FACTORS, _PANEL, 1), FACTOR_INPUTS, axis=4)
    return codes, by_input(by_unit * (by_factor & 15)), by_input(by_factor >> 4)


@dataclass(frozen=True)
class PackedExperts(Generic[A]):
    """One weight matrix of every expert, packed one after another as PackedLinear's: u8[num_experts * packed_bytes]."""

    data: A
    num_experts: int
    in_features: int
    out_features: int
    format: LinearFormat

    @property
    def expert_bytes(self) -> int:
        """Of one matrix."""
        return packed_bytes(self.in_features, self.out_features, self.format)


def experts_shape(weights: Sequence[WeightMatrix]) -> tuple[int, int]:
    """Return the (out_features, in_features) that all experts share; raises ValueError where they share none."""
    shapes = {weight.shape for weight in weights}
    if len(shapes) != 1:
        raise ValueError(f"weights: expected experts of one shape [N, K], got shapes {sorted(shapes)}")
    return shapes.pop()
