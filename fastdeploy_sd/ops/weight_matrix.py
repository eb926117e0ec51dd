"""A weight matrix as a checkpoint holds it: parts in any storage, which packing reads in place. Knows no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.group_format import GroupFormat
from fastdeploy_sd.ops.input_order import InputOrder
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.types import F32, U8
from fastdeploy_sd.types.ranges import SliceRule

Array = npt.NDArray[np.generic]
# Outputs that are made numbers at a time.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Weights as codes of a format that a kernel multiplies.

    Attributes:
        read: (some of the N rows) -> u8[n, K].
        scales: f32[N, G], one per output and group of inputs.
        is_exact: bool[N, G]: the group's numbers are codes * scale. Other groups are quantised from their numbers.
        factors: u8[N, G, 8] of wint4, for each 16 inputs a factor of the scale + 16 * what codes count from.
    """

    read: Callable[[range], U8]
    scales: F32
    is_exact: npt.NDArray[np.bool_]
    factors: U8 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A number per group of inputs: step * count.

    Attributes:
        steps: f32[n, G].
        counts: i8[n, G]; None = ones.
    """

    steps: F32
    counts: npt.NDArray[np.int8] | None = None

    def numbers(self) -> F32:
        """Return f32[n, G]."""
        return self.steps if self.counts is None else self.steps * self.counts

    def repeated(self, times: int) -> Factors:
        """Return those of groups that are cut into so many."""
        counts = None if self.counts is None else np.repeat(self.counts, times, axis=1)
        return Factors(np.repeat(self.steps, times, axis=1), counts)

    def columns(self, groups: slice) -> Factors:
        """Return those of some groups."""
        return Factors(self.steps[:, groups], None if self.counts is None else self.counts[:, groups])


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """Numbers as integers: scale * code + minimum, or - minimum where that has counts.

    Attributes:
        codes: i8[n, K].
        scales, minima: of groups of K / G inputs.
    """

    codes: npt.NDArray[np.int8]
    scales: Factors
    minima: Factors | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.codes.shape[1] // self.scales.steps.shape[1])

    def numbers(self) -> F32:
        """Return f32[n, K]."""
        scales = self.scales.numbers()
        n, groups = scales.shape
        numbers = self.codes.reshape(n, groups, -1) * scales[:, :, None]
        if self.minima is not None:
            numbers += self.minimum_numbers()[:, :, None]
        return numbers.reshape(n, -1)

    def minimum_numbers(self) -> F32:
        """Return f32[n, G], what is added to the numbers of each group."""
        if self.minima is None:
            return np.zeros(self.scales.steps.shape, np.float32)
        minima = self.minima.numbers()
        return minima if self.minima.counts is None else -minima

    def in_groups(self, size: int) -> Integers:
        """Return the same numbers in groups of another size, which divides the own one."""
        times = self.group // size
        if times == 1:
            return self
        minima = None if self.minima is None else self.minima.repeated(times)
        return Integers(self.codes, self.scales.repeated(times), minima)

    def columns(self, wanted: range) -> Integers:
        """Return some of the inputs, which begin and end with a group or the matrix."""
        groups = slice(wanted.start // self.group, -(-wanted.stop // self.group))
        minima = None if self.minima is None else self.minima.columns(groups)
        return Integers(self.codes[:, wanted.start : wanted.stop], self.scales.columns(groups), minima)


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart(ABC):
    """Some outputs of a weight matrix [N, K] in the storage of its checkpoint.

    Attributes:
        data: numbers or codes, [N, K] unless the storage says otherwise; may be a view of a read-only memory map whose
            rows are not neighbours.
        place: which part of the weight it is, "" = all of it.
    """

    name: str
    data: Array
    place: str = field(default="", kw_only=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K); raises ValueError when `data` is no matrix."""
        return _matrix_shape(self.data)

    @property
    def num_bytes(self) -> int:
        """What it takes in the checkpoint."""
        return self.data.nbytes

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that it is read from."""
        return (self.name,)

    def numbers(self) -> FloatPart:
        """Return it as numbers: in place where it is such, else f32."""
        values = np.empty(self.shape, np.float32)
        for begin in range(0, len(values), _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, len(values))
            values[begin:end] = self.rows(begin, end).values()
        return FloatPart(self.name, values, place=self.place)

    def values(self) -> F32:
        """Return its numbers, f32[N, K], of few outputs: at once."""
        raise NotImplementedError

    def code_format(self, slices: SliceRule) -> LinearFormat | None:
        """Return the format of one scale per group of inputs whose codes hold it exactly, None where there is none.

        Parts that ranks have of one weight give the same answer.
        """
        return None

    def codes(self, fmt: LinearFormat, slices: SliceRule) -> Codes | None:
        """Return it as codes of a format, with a scale per group of inputs; None where its storage has none."""
        return None

    @property
    def group_format(self) -> GroupFormat | None:
        """How it is held where its storage is integers, else None."""
        return None

    def input_order(self, slices: SliceRule) -> InputOrder | None:
        """Return the order of inputs in which groups are neighbours, None where they are or there are none."""
        return None

    def in_order(self, order: InputOrder) -> WeightPart:
        """Return it with its inputs in an order, for a sum in its slices; only of a part that has one."""
        raise NotImplementedError

    @property
    def first_column(self) -> int:
        """Where its columns begin within blocks or groups of the storage."""
        return 0

    def integers(self, rows: slice) -> Integers:
        """Return some rows as integers; only of a part that has a group format."""
        raise NotImplementedError

    def rows(self, begin: int, end: int) -> Self:
        """Return some of the outputs, in place."""
        num_rows, num_columns = self.shape
        if (begin, end) == (0, num_rows):
            return self
        return replace(self._cut(range(begin, end), range(num_columns)), place=f"{self.place}[{begin}:{end}]")

    def columns(self, begin: int, end: int) -> Self:
        """Return some of the inputs, in place."""
        num_rows, num_columns = self.shape
        if (begin, end) == (0, num_columns):
            return self
        return replace(self._cut(range(num_rows), range(begin, end)), place=f"{self.place}[:, {begin}:{end}]")

    @abstractmethod
    def _cut(self, rows: range, columns: range) -> Self:
        """Return some of the outputs and inputs, in place."""


@dataclass(frozen=True, slots=True, eq=False)
class FloatPart(WeightPart):
    """A part that is stored as numbers: f32, f16 or bf16 (u16 bits) [N, K], or [K, N] if transposed."""

    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return _matrix_shape(self.data.T if self.is_transposed else self.data)

    def numbers(self) -> FloatPart:
        return self

    def _cut(self, rows: range, columns: range) -> Self:
        first, second = (columns, rows) if self.is_transposed else (rows, columns)
        return replace(self, data=self.data[first.start : first.stop, second.start : second.stop])


@dataclass(frozen=True, slots=True, eq=False)
class WeightMatrix:
    """A weight matrix [N, K] as parts of one K that follow one another along N: q, k and v, or gate and up."""

    parts: tuple[WeightPart, ...]

    @classmethod
    def whole(cls, data: Array, name: str = "weight") -> WeightMatrix:
        return cls((FloatPart(name, data),))

    @property
    def name(self) -> str:
        """The names of the parts: two matrices of one checkpoint with the same name hold the same values."""
        return " | ".join(part.name + part.place for part in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K). Raises ValueError: a part is no matrix, or their K differ."""
        shapes = [part.shape for part in self.parts]
        if len({columns for _, columns in shapes}) != 1:
            raise ValueError(f"weight: expected parts [N, K] of one K, got shapes {shapes}")
        return sum(rows for rows, _ in shapes), shapes[0][1]

    def rows(self, ranges: Sequence[range]) -> WeightMatrix:
        """Return a matrix of some of the outputs, range after range, in place."""
        parts = []
        for wanted in _joined(ranges):
            first = 0
            for part in self.parts:
                num_rows = part.shape[0]
                begin, end = max(wanted.start - first, 0), min(wanted.stop - first, num_rows)
                if begin < end:
                    parts.append(part.rows(begin, end))
                first += num_rows
        return WeightMatrix(tuple(parts))

    def columns(self, wanted: range) -> WeightMatrix:
        """Return a matrix of some of the inputs, in place."""
        return WeightMatrix(tuple(part.columns(wanted.start, wanted.stop) for part in self.parts))

    def numbers(self) -> WeightMatrix:
        """Return it as numbers: in place where it is such, else parts of f32."""
        return WeightMatrix(self.float_parts())

    def float_parts(self) -> tuple[FloatPart, ...]:
        return tuple(part.numbers() for part in self.parts)

    def to_array(self) -> Array:
        """Return the matrix as one array f32 or bf16 (u16 bits) [N, K]; a copy unless it is that already."""
        rows = [part.data.T if part.is_transposed else part.data for part in self.float_parts()]
        is_narrow = all(part.dtype == np.uint16 for part in rows)
        arrays = rows if is_narrow else [part if part.dtype == np.float32 else widen(part) for part in rows]
        return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _matrix_shape(data: Array) -> tuple[int, int]:
    if data.ndim != 2:  # noqa: PLR2004
        raise ValueError(f"weight: expected [N, K], got shape {list(data.shape)}")
    rows, columns = data.shape
    return rows, columns


def _joined(ranges: Sequence[range]) -> list[range]:
    """The same numbers in as few ranges."""
    joined: list[range] = []
    for part in ranges:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
