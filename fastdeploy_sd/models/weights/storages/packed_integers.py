"""Matrices of integers of which several lie in a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.source import Weights, WeightSource
from fastdeploy_sd.types import I32, U8

_BYTE, _WORD = 8, 32
_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True, eq=False)
class PackedIntegers:
    """A matrix [N, K] of integers from 0 on, of which neighbours along an axis share a word.

    Attributes:
        words: along the axis N or K divided by the integers of a word, rounded up. Words of int8 count from -128 on.
        order: which of its neighbours the n-th integer of a word is, from the lowest bits on.
        begin, end: the matrix along the axis, counted from the first word on.
        picked: i32[K], which of these columns each one is, -1 = any; None: all in order.
    """

    words: Weights
    bits: int
    axis: int
    order: Sequence[int]
    begin: int
    end: int
    picked: I32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        size, (num_rows, num_columns) = self.end - self.begin, self.words.shape
        num_rows, num_columns = (size, num_columns) if self.axis == 0 else (num_rows, size)
        return num_rows, num_columns if self.picked is None else len(self.picked)

    def cut(self, rows: range, columns: range) -> PackedIntegers:
        """Return a part, in place."""
        if self.picked is not None:
            every = replace(self, picked=None)
            part = every.cut(rows, range(every.shape[1]))
            return replace(part, picked=self.picked[columns.start : columns.stop])
        along, across = (rows, columns) if self.axis == 0 else (columns, rows)
        begin, end, per_word = self.begin + along.start, self.begin + along.stop, len(self.order)
        first = begin // per_word
        words = slice(first, -(-end // per_word)), slice(across.start, across.stop)
        data = self.words[words if self.axis == 0 else words[::-1]]
        return replace(self, words=data, begin=begin - first * per_word, end=end - first * per_word)

    def read(self) -> U8:
        """Return u8[N, K]."""
        num_rows, num_columns = self.words.shape
        data = np.ascontiguousarray(self.words).view(np.uint8).reshape(num_rows, num_columns, -1)
        if self.words.dtype == np.int8:
            data = data ^ np.uint8(128)
        mask, per_word = np.uint8((1 << self.bits) - 1), len(self.order)
        # [rows, neighbours, columns] or [rows, columns, neighbours]
        shape = (num_rows, per_word, num_columns) if self.axis == 0 else (num_rows, num_columns, per_word)
        values = np.empty(shape, np.uint8)
        by_place = values.swapaxes(1, 2) if self.axis == 0 else values
        for n, place in enumerate(self.order):
            byte, shift = divmod(n * self.bits, _BYTE)
            by_place[:, :, place] = data[:, :, byte] >> np.uint8(shift) & mask
        if self.axis == 0:
            found = values.reshape(-1, num_columns)[self.begin : self.end]
        else:
            found = values.reshape(num_rows, -1)[:, self.begin : self.end]
        return found if self.picked is None else found[:, self.picked]


def in_order(bits: int) -> tuple[int, ...]:
    """The `order` of integers that lie in a word of 32 bits as they follow one another."""
    return tuple(range(_WORD // bits))


def bits_of_words(source: WeightSource, name: str, axis: int, size: int) -> int:
    """Return the bits of integers of which `size` lie along an axis of words; raises CheckpointError: not 2, 4 or 8."""
    shape = source.shape(name) if name in source else ()
    for bits in _BITS:
        if len(shape) == len(("N", "K")) and shape[axis] == -(-size * bits // _WORD):
            return bits
    found = f"shape {shape}" if name in source else "none"
    raise CheckpointError(
        f"{source.path}: tensor {name!r}: expected words of {size} integers of {', '.join(map(str, _BITS))} bits,"
        f" got {found}"
    )
