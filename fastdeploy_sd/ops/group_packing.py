"""Packs weights that are integers with a scale per group of inputs, as custom_ops/cpu/kernels/linear_grouped.h says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import CParams, call, num_threads
from fastdeploy_sd.ops.group_format import GROUP_FORMATS, UNIT, GroupFormat
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.packing import CODE_ZEROS, GROUP, input_groups, pack_linear, packed_bytes, unpack_codes
from fastdeploy_sd.ops.weight_matrix import Codes, Factors, Integers, WeightMatrix
from fastdeploy_sd.types import I32, U8
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

I8 = npt.NDArray[np.int8]
_PANEL = 32
_QUANTISING = Lock()  # kernels that use all threads are called one at a time
_CODES_AT_ONCE = 1 << 18  # arrays of so many stay in the cache


def group_format(matrices: Sequence[WeightMatrix], slices: SliceRule) -> LinearFormat | None:
    """Return the narrowest format that holds matrices without rounding, None where no part is integers.

    float32 holds what no format of groups does, and what is integers in part.
    """
    parts = [part for matrix in matrices for part in matrix.parts]
    codes = {part.code_format(slices) for part in parts}
    if len(codes) == 1 and None not in codes:
        return codes.pop()
    wanted = [part.group_format for part in parts]
    if all(own is None for own in wanted):
        return None
    begins = [part.first_column + piece.start for part in parts for piece in slices.ranges(part.shape[1])]
    # Of a rank that has one slice, too: all ranks add up the same groups.
    begins += [slices.unit] * (slices != WHOLE)
    fit = [
        name
        for name, fmt in GROUP_FORMATS.items()
        if all(own is not None and fmt.holds(own) for own in wanted) and all(begin % fmt.unit == 0 for begin in begins)
    ]
    if not fit:
        return "float32"
    return min(fit, key=lambda name: packed_bytes(UNIT, _PANEL, name))


class OrderedMatrix(NamedTuple):
    """A matrix as it is packed, how a sum over its columns is cut, and which input i32[K] each one multiplies."""

    matrix: WeightMatrix
    slices: SliceRule
    inputs: I32 | None


def in_group_order(matrix: WeightMatrix, slices: SliceRule) -> OrderedMatrix:
    """Return a matrix whose groups are neighbours, where a format of groups then holds it; else the matrix itself."""
    order, *others = (part.input_order(slices) for part in matrix.parts)
    if order is not None and all(other is not None and order.is_same(other) for other in others):
        ordered = WeightMatrix(tuple(part.in_order(order) for part in matrix.parts))
        if group_format([ordered], order.slices) in GROUP_FORMATS:
            return OrderedMatrix(ordered, order.slices, order.inputs)
    return OrderedMatrix(matrix, slices, None)


def kept_format(
    matrices: Sequence[WeightMatrix], fmt: LinearFormat, slices: SliceRule, *, on_gpu: bool
) -> LinearFormat | None:
    """Return the format that holds what matrices store as it is, None where they become `fmt`.

    Codes of e4m3 are multiplied with rows of bfloat16; they are kept where each group of 128 inputs of any rank's
    slices has one scale.
    """
    kept = group_format(matrices, slices)
    if kept == "e4m3":
        is_fit = fmt == "bfloat16" and (slices == WHOLE or slices.unit % GROUP == 0)
        return kept if is_fit else None
    return None if on_gpu and kept not in GROUP_FORMATS else kept


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A matrix [N, K] that is packed as it is stored.

    Attributes:
        read: (rows of whole panels, but for the last) -> codes i8[n, K] less the format's zero, and what units have
            after their codes, u8[panels, units, bytes].
    """

    shape: tuple[int, int]
    format: LinearFormat
    slices: SliceRule
    read: Callable[[range], tuple[I8, U8]]

    def each(self, rows: range, take: Callable[[range, I8, U8], object]) -> None:
        """Call take(rows, *read(rows)) for some panels of these rows at a time, on all threads."""
        at_once = max(_CODES_AT_ONCE // max(self.shape[1], 1) // _PANEL, 1) * _PANEL

        def read_rows(begin: int) -> None:
            own = range(begin, min(begin + at_once, rows.stop))
            take(own, *self.read(own))

        # NumPy and kernels work on arrays without holding Python's lock.
        with ThreadPoolExecutor(num_threads()) as pool:
            list(pool.map(read_rows, range(rows.start, rows.stop, at_once)))


def stored_matrix(
    matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule, *, keeps_integers: bool = True
) -> StoredMatrix | None:
    """Return a matrix as it is packed in a format with the codes that it is stored with, None where it has none.

    keeps_integers: the format is one that holds its integers; other formats have codes of their own.
    """
    if fmt in CODE_ZEROS:
        parts = [part.codes(fmt, slices) for part in matrix.parts]
        codes = [found for found in parts if found is not None]
        if len(codes) == len(parts):
            return StoredMatrix(matrix.shape, fmt, slices, partial(_codes_of_rows, matrix, fmt, slices, codes))
    if not keeps_integers:
        return None
    return StoredMatrix(matrix.shape, fmt, slices, partial(_integers_of_rows, matrix, GROUP_FORMATS[fmt], slices))


def pack_groups(stored: StoredMatrix, out: U8) -> None:
    """Pack a matrix into u8[packed_bytes(...)]; each group by itself, so ranks have the bytes of the whole."""
    panels = out.reshape(-(-stored.shape[0] // _PANEL), -1)

    def pack(rows: range, codes: I8, factors: U8) -> None:
        own = np.ascontiguousarray(codes)
        address = panels[rows.start // _PANEL :].ctypes.data
        call("pack_integers", pack_integers_params(address, own.shape, stored, own.ctypes.data, factors.ctypes.data))

    stored.each(range(stored.shape[0]), pack)


def _integers_of_rows(matrix: WeightMatrix, fmt: GroupFormat, slices: SliceRule, rows: range) -> tuple[I8, U8]:
    parts = [part.integers(slice(None)).in_groups(fmt.group) for part in matrix.rows([rows]).parts]
    integers = _joined(parts, fmt)
    return integers.codes, factor_bytes(integers, fmt, slices.ranges(matrix.shape[1]))


def _codes_of_rows(
    matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule, parts: Sequence[Codes], rows: range
) -> tuple[I8, U8]:
    """A group that codes do not hold exactly is quantised from its numbers."""
    own, begin = [], 0
    for part in parts:
        end = begin + len(part.scales)
        inside = range(max(rows.start, begin) - begin, min(rows.stop, end) - begin)
        if inside:
            own.append((part, inside))
        begin = end
    codes = np.concatenate([part.read(inside) for part, inside in own])
    scales, is_exact = (
        np.concatenate([values(part)[inside.start : inside.stop] for part, inside in own])
        for values in (attrgetter("scales"), attrgetter("is_exact"))
    )
    if not is_exact.all():
        with _QUANTISING:
            quantised = unpack_codes(pack_linear(matrix.rows([rows]), fmt, slices))
        for g, group in enumerate(input_groups(matrix.shape[1], slices)):
            others = ~is_exact[:, g]
            codes[others, group.start : group.stop] = quantised[0][others, group.start : group.stop]
            scales[others, g] = quantised[1][others, group.start]
    planes = _columns_of_panels(scales[:, :, None])
    if fmt == "wint4":
        factors = [part.factors[inside.start : inside.stop] for part, inside in own if part.factors is not None]
        planes = np.concatenate([_columns_of_panels(np.concatenate(factors)), planes], axis=2)
    return (codes ^ np.uint8(CODE_ZEROS[fmt])).view(np.int8), planes


def _columns_of_panels(values: npt.NDArray[Any]) -> U8:
    """Return values [n, units, m] as the bytes of [panels, units, m, columns], zeros where the last panel has ended."""
    num_rows, num_units, count = values.shape
    padded = np.zeros((-(-num_rows // _PANEL) * _PANEL, num_units, count), values.dtype)
    padded[:num_rows] = values
    ordered = np.ascontiguousarray(padded.reshape(-1, _PANEL, num_units, count).transpose(0, 2, 3, 1))
    return ordered.reshape(len(ordered), num_units, -1).view(np.uint8)


def pack_integers_params(
    address: int, shape: tuple[int, ...], stored: StoredMatrix, codes: int, factors: int
) -> CParams:
    """Return PackIntegersParams of some rows [n, K] over the addresses of what they are packed to, and from."""
    out_features, in_features = shape
    return struct_type("PackIntegersParams")(
        in_features=in_features,
        out_features=out_features,
        format=format_code(stored.format),
        num_slices=stored.slices.count,
        slice_unit=stored.slices.unit,
        codes=codes,
        factors=factors,
        packed=address,
    )


def _joined(parts: Sequence[Integers], fmt: GroupFormat) -> Integers:
    """Return parts as one, with scales and minima of the format's kind."""

    def joined(factors: Sequence[Factors], kind: str) -> Factors:
        if kind in ("steps", "zeros"):
            counts = [part.counts for part in factors if part.counts is not None]
            return Factors(np.concatenate([part.steps for part in factors]), np.concatenate(counts))
        return Factors(np.concatenate([part.numbers() for part in factors]))

    minima = None
    if fmt.minimum == "float":
        minima = joined([Factors(part.minimum_numbers()) for part in parts], fmt.minimum)
    elif fmt.minimum != "none":
        none = [Factors(np.zeros_like(part.scales.steps), np.zeros(part.scales.steps.shape, np.int8)) for part in parts]
        minima = joined([part.minima or zeros for part, zeros in zip(parts, none, strict=True)], fmt.minimum)
    scales = joined([part.scales for part in parts], fmt.scale)
    return Integers(np.concatenate([part.codes for part in parts]), scales, minima)


def factor_bytes(rows: Integers, fmt: GroupFormat, pieces: Sequence[range]) -> U8:
    """Return u8[panels, units, bytes]: scales and minima of some rows of a matrix, the last panel padded with zeros.

    Args:
        rows: of whole panels, but for the last.
        pieces: the columns of each slice, whose units begin anew; at multiples of the format's groups.
    """
    found = []
    for piece in pieces:
        own, num_units = rows.columns(piece), -(-len(piece) // UNIT)
        planes = _factor_planes(own.scales, fmt.scale, fmt.group, num_units)
        if own.minima is not None:
            planes += _factor_planes(own.minima, fmt.minimum, fmt.group, num_units)
        found.append(np.concatenate(planes, axis=2))
    return np.concatenate(found, axis=1)


def _factor_planes(factors: Factors, kind: str, group: int, num_units: int) -> list[U8]:
    """Return [panels, units, groups, columns] of each part of the factors, as bytes."""

    def plane(values: npt.NDArray[np.generic], per_unit: int) -> U8:
        padded = np.zeros((len(values), num_units * per_unit), values.dtype)
        padded[:, : values.shape[1]] = values
        return _columns_of_panels(padded.reshape(len(values), num_units, per_unit))

    if kind == "steps":
        assert factors.counts is not None
        # One step of every unit: those of its first group.
        steps = factors.steps[:, :: UNIT // group].astype(np.float16)
        return [plane(steps, 1), plane(factors.counts, UNIT // group)]
    if kind == "zeros":
        assert factors.counts is not None
        return [plane(factors.counts, UNIT // group)]
    values = factors.steps.astype(np.float16) if kind == "half" else factors.steps
    return [plane(values, UNIT // group)]
