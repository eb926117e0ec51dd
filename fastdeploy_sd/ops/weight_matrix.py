"""A weight matrix as a checkpoint holds it: parts, some transposed, that packing reads in place. Knows no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.float8_blocks import BlockScales, dequantized

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """Some outputs of a weight matrix.

    Attributes:
        name: of the tensor in its checkpoint.
        data: f32, f16 or bf16 (u16 bits) [N, K], or [K, N] if transposed; may be a view of a read-only memory map whose
            rows are not neighbours.
        place: which part of the tensor it is, "" = all of it.
        scales: `data` is codes of e4m3 (u8) with these scales; never transposed. None: it is numbers.
    """

    name: str
    data: Array
    is_transposed: bool = False
    place: str = ""
    scales: BlockScales | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K); raises ValueError when `data` is no matrix."""
        if self.data.ndim != 2:  # noqa: PLR2004
            raise ValueError(f"weight: expected [N, K], got shape {list(self.data.shape)}")
        rows, columns = self.data.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    def rows(self, begin: int, end: int) -> WeightPart:
        """Return some of the outputs, in place."""
        if (begin, end) == (0, self.shape[0]):
            return self
        data = self.data[:, begin:end] if self.is_transposed else self.data[begin:end]
        scales = None if self.scales is None else self.scales.moved(rows=begin)
        return replace(self, data=data, place=f"{self.place}[{begin}:{end}]", scales=scales)

    def columns(self, begin: int, end: int) -> WeightPart:
        """Return some of the inputs, in place."""
        if (begin, end) == (0, self.shape[1]):
            return self
        data = self.data[begin:end] if self.is_transposed else self.data[:, begin:end]
        scales = None if self.scales is None else self.scales.moved(columns=begin)
        return replace(self, data=data, place=f"{self.place}[:, {begin}:{end}]", scales=scales)

    def numbers(self) -> WeightPart:
        """Return it as numbers: in place where it is such, else f32."""
        if self.scales is None:
            return self
        return replace(self, data=dequantized(self.data.view(np.uint8), self.scales), scales=None)


@dataclass(frozen=True, slots=True, eq=False)
class WeightMatrix:
    """A weight matrix [N, K] as parts that follow one another along N: q, k and v, or gate and up.

    Attributes:
        parts: at least one, all with the same K.
    """

    parts: tuple[WeightPart, ...]

    @classmethod
    def whole(cls, data: Array, name: str = "weight") -> WeightMatrix:
        """Return a matrix of one part [N, K]."""
        return cls((WeightPart(name, data),))

    @property
    def name(self) -> str:
        """The names of the parts: two matrices of one checkpoint with the same name hold the same values."""
        return " | ".join(part.name + part.place for part in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K).

        Raises:
            ValueError: a part is no matrix, or their K differ.
        """
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
        return WeightMatrix(tuple(part.numbers() for part in self.parts))

    def to_array(self) -> Array:
        """Return the matrix as one array f32 or bf16 (u16 bits) [N, K]; a copy unless it is that already."""
        rows = [part.data.T if part.is_transposed else part.data for part in self.numbers().parts]
        is_narrow = all(part.dtype == np.uint16 for part in rows)
        arrays = rows if is_narrow else [part if part.dtype == np.float32 else widen(part) for part in rows]
        return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _joined(ranges: Sequence[range]) -> list[range]:
    """The same numbers in as few ranges."""
    joined: list[range] = []
    for part in ranges:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
