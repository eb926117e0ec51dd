"""A weight whose columns a file stores in another order, range after range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fastdeploy_sd.ops.group_format import GroupFormat
from fastdeploy_sd.ops.weight_matrix import Factors, FloatPart, Integers, WeightPart


@dataclass(frozen=True, slots=True, eq=False)
class OrderedColumns(WeightPart):
    """Columns of one weight, piece after piece; what is stored as integers stays so where pieces are whole groups."""

    pieces: tuple[WeightPart, ...]

    @classmethod
    def of(cls, part: WeightPart, columns: Sequence[range]) -> OrderedColumns:
        """Return a part with these columns of it, in this order."""
        pieces = tuple(part.columns(own.start, own.stop) for own in columns)
        return cls(part.name, part.data, pieces, place=part.place)

    @property
    def shape(self) -> tuple[int, int]:
        return self.pieces[0].shape[0], sum(piece.shape[1] for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def group_format(self) -> GroupFormat | None:
        return self.pieces[0].group_format

    @property
    def first_column(self) -> int:
        """A number whose multiples all pieces begin at, here and in their blocks."""
        begins = np.cumsum([0, *(piece.shape[1] for piece in self.pieces[:-1])])
        return math.gcd(*(piece.first_column for piece in self.pieces), *map(int, begins))

    def numbers(self) -> FloatPart:
        found = [piece.numbers() for piece in self.pieces]
        columns = [part.data.T if part.is_transposed else part.data for part in found]
        return FloatPart(self.name, np.concatenate(columns, axis=1), place=self.place)

    def integers(self, rows: slice) -> Integers:
        found = [piece.integers(rows) for piece in self.pieces]
        group = math.gcd(*(part.group for part in found))  # a piece may have a part of one
        found = [part.in_groups(group) for part in found]
        minima = [part.minima for part in found if part.minima is not None]
        codes = np.concatenate([part.codes for part in found], axis=1)
        return Integers(codes, _joined([part.scales for part in found]), _joined(minima) if minima else None)

    def _cut(self, rows: range, columns: range) -> Self:
        pieces, first = [], 0
        for piece in self.pieces:
            width = piece.shape[1]
            begin, end = max(columns.start - first, 0), min(columns.stop - first, width)
            if begin < end:
                pieces.append(piece.rows(rows.start, rows.stop).columns(begin, end))
            first += width
        return type(self)(self.name, self.data, tuple(pieces), place=self.place)


def _joined(factors: Sequence[Factors]) -> Factors:
    counts = [own.counts for own in factors if own.counts is not None]
    steps = np.concatenate([own.steps for own in factors], axis=1)
    return Factors(steps, np.concatenate(counts, axis=1) if counts else None)
