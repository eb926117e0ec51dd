"""Weights that a checkpoint stores as e4m3 with a scale per block of 128 x 128: what they are, and packed as they are.

Knows no framework and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.parallel.ranges import WHOLE, SliceRule

BLOCK = 128
# As custom_ops/cpu/kernels/linear_layout.h packs fp8: panels of 32 outputs, in each groups of 128 inputs, and their
# scales.
_PANEL, _WORD = 32, 4
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
_MAGNITUDE, _NAN = 0x7F, 0x7F


def _values() -> F32:
    """Return what every code of e4m3 stands for; it has no infinities."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    numbers = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    numbers[codes & _MAGNITUDE == _NAN] = np.nan
    return np.where(codes < 128, numbers, -numbers).astype(np.float32)  # noqa: PLR2004 (the sign's bit)


_VALUES = _values()


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales:
    """The scales of a part of a matrix.

    Attributes:
        scales: f32[rows / 128, inputs / 128] of the whole matrix, rounded up.
        row, column: of the whole matrix at which the part begins.
    """

    scales: F32
    row: int = 0
    column: int = 0

    def moved(self, rows: int = 0, columns: int = 0) -> BlockScales:
        """Return those of a part that begins so much further on."""
        return replace(self, row=self.row + rows, column=self.column + columns)

    def of_rows(self, begin: int, end: int, num_columns: int) -> F32:
        """Return f32[end - begin, num_columns]: the scale of every element of some rows of the part."""
        rows, columns = (np.arange(*ends) // BLOCK for ends in (
            (self.row + begin, self.row + end), (self.column, self.column + num_columns),
        ))  # fmt: skip
        return self.scales[rows[:, None], columns]


def dequantized(codes: U8, scales: BlockScales) -> F32:
    """Return codes * scales, f32[N, K]."""
    num_rows, num_columns = codes.shape
    values = np.empty(codes.shape, np.float32)
    for begin in range(0, num_rows, BLOCK):
        end = min(begin + BLOCK, num_rows)
        np.multiply(_VALUES[codes[begin:end]], scales.of_rows(begin, end, num_columns), out=values[begin:end])
    return values


def packed_as_stored(parts: list[tuple[U8, BlockScales]], slices: SliceRule = WHOLE) -> U8 | None:
    """Return a matrix's parts packed for `linear` in fp8 with the very codes and scales they are stored with.

    Args:
        parts: u8[N, K] each, one below the other.

    Returns:
        None where that is not possible: a group of 128 inputs of a slice has more than one block's, or a code is NaN.
    """
    num_columns = parts[0][0].shape[1]
    groups = [
        range(begin, min(begin + BLOCK, piece.stop))
        for piece in slices.ranges(num_columns)
        for begin in range(piece.start, piece.stop, BLOCK)
    ]
    for codes, scales in parts:
        begins, lasts = (np.array([group[i] for group in groups]) + scales.column for i in (0, -1))
        if (begins // BLOCK != lasts // BLOCK).any() or (codes & _MAGNITUDE == _NAN).any():
            return None
    num_rows = sum(len(codes) for codes, _ in parts)
    num_panels = -(-num_rows // _PANEL)
    all_codes = np.zeros((num_panels * _PANEL, len(groups), BLOCK), np.uint8)
    all_scales = np.zeros((num_panels * _PANEL, len(groups)), np.float32)
    first = 0
    for codes, scales in parts:
        rows = slice(first, first + len(codes))
        of_rows = scales.of_rows(0, len(codes), num_columns)
        for g, group in enumerate(groups):
            all_codes[rows, g, : len(group)] = codes[:, group.start : group.stop]
            all_scales[rows, g] = of_rows[:, group.start]
        first = rows.stop
    words = all_codes.reshape(num_panels, _PANEL, len(groups), BLOCK // _WORD, _WORD).transpose(0, 2, 3, 1, 4)
    scale_bytes = np.ascontiguousarray(all_scales.reshape(num_panels, _PANEL, len(groups)).transpose(0, 2, 1))
    shape = num_panels, len(groups), -1
    return np.concatenate([words.reshape(shape), scale_bytes.view(np.uint8).reshape(shape)], axis=2).reshape(-1)
