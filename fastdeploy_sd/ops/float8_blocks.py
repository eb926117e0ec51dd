"""Weights that a checkpoint stores as e4m3 with a scale per block of 128 x 128: what they are, and packed as they are.

Knows no framework and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.types import F32, U8, Rows
from fastdeploy_sd.types.ranges import SliceRule

BLOCK = 128
# As custom_ops/cpu/kernels/linear_layout.h packs fp8: panels of 32 outputs, in each groups of 128 inputs, and their
# scales.
_PANEL, _WORD = 32, 4
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

    def at(self, rows: Rows, columns: Rows) -> F32:
        """Return f32[n, m]: the scale of every element at some rows and some columns of the part."""
        return self.scales[(self.row + rows[:, None]) // BLOCK, (self.column + columns) // BLOCK]


def dequantized(codes: U8, scales: BlockScales) -> F32:
    """Return codes * scales, f32[N, K]."""
    num_rows, num_columns = codes.shape
    values = np.empty(codes.shape, np.float32)
    for begin in range(0, num_rows, BLOCK):
        end = min(begin + BLOCK, num_rows)
        scale = scales.at(np.arange(begin, end), np.arange(num_columns))
        np.multiply(_VALUES[codes[begin:end]], scale, out=values[begin:end])
    return values


def packed_as_stored(parts: list[tuple[U8, BlockScales]], slices: SliceRule, pack_anew: Callable[[], U8]) -> U8:
    """Return a matrix's parts packed for `linear` in fp8 with the very codes and scales they are stored with.

    An output's group of 128 inputs of a slice is quantised anew where it has two blocks' inputs, or a code is NaN. It
    is looked at by itself, so ranks that have parts of a matrix have the bytes of the whole.

    Args:
        parts: u8[N, K] each, one below the other.
        pack_anew: packs the numbers that the parts stand for; called where a group is quantised anew.
    """
    num_columns = parts[0][0].shape[1]
    groups = [
        range(begin, min(begin + BLOCK, piece.stop))
        for piece in slices.ranges(num_columns)
        for begin in range(piece.start, piece.stop, BLOCK)
    ]
    begins, lasts = (np.array([group[i] for group in groups]) for i in (0, -1))
    num_rows = sum(len(codes) for codes, _ in parts)
    num_panels = -(-num_rows // _PANEL)
    all_codes = np.zeros((num_panels * _PANEL, len(groups), BLOCK), np.uint8)
    all_scales = np.zeros((num_panels * _PANEL, len(groups)), np.float32)
    is_kept = np.ones(all_scales.shape, np.bool_)
    first = 0
    for codes, scales in parts:
        rows = slice(first, first + len(codes))
        all_scales[rows] = scales.at(np.arange(len(codes)), begins)
        is_kept[rows] = (begins + scales.column) // BLOCK == (lasts + scales.column) // BLOCK
        for g, group in enumerate(groups):
            all_codes[rows, g, : len(group)] = codes[:, group.start : group.stop]
        first = rows.stop
    is_kept &= ~(all_codes & _MAGNITUDE == _NAN).any(axis=2)
    places = num_panels, _PANEL, len(groups)
    words = all_codes.reshape(*places, BLOCK // _WORD, _WORD).transpose(0, 2, 3, 1, 4)
    scale_words = all_scales.reshape(places).transpose(0, 2, 1)
    if not is_kept.all():
        mask = is_kept.reshape(places).transpose(0, 2, 1)
        anew = pack_anew().reshape(num_panels, len(groups), -1)
        words = np.where(mask[:, :, None, :, None], words, anew[:, :, : _PANEL * BLOCK].reshape(words.shape))
        scale_words = np.where(mask, scale_words, np.ascontiguousarray(anew[:, :, _PANEL * BLOCK :]).view(np.float32))
    shape = num_panels, len(groups), -1
    scale_bytes = np.ascontiguousarray(scale_words).view(np.uint8)
    return np.concatenate([words.reshape(shape), scale_bytes.reshape(shape)], axis=2).reshape(-1)
