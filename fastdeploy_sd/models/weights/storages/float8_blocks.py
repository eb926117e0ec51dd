"""Weights stored as e4m3 with a scale per block of 128 x 128, as DeepSeek's and Qwen's checkpoints are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.weight_matrix import Codes, FloatPart, WeightPart
from fastdeploy_sd.types import F32, Rows

BLOCK = 128
_DTYPE = "F8_E4M3"
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
class Float8Part(WeightPart):
    """A part stored as codes of e4m3, u8[N, K]; a number is code * scale.

    The scales f32[N / 128, K / 128], rounded up, are those of the whole weight, in which it begins at (row, column).
    """

    scales: F32
    row: int = 0
    column: int = 0

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.name, _scales_name(self.name)

    def numbers(self) -> FloatPart:
        num_rows, num_columns = self.shape
        values = np.empty(self.data.shape, np.float32)
        for begin in range(0, num_rows, BLOCK):
            end = min(begin + BLOCK, num_rows)
            scale = self._scales_at(np.arange(begin, end), np.arange(num_columns))
            np.multiply(_VALUES[self.data[begin:end].view(np.uint8)], scale, out=values[begin:end])
        return FloatPart(self.name, values, place=self.place)

    def codes(self, fmt: LinearFormat, groups: Sequence[range]) -> Codes | None:
        """See WeightPart.codes. A group with inputs of two blocks is not exact, nor is one with a NaN."""
        if fmt != "fp8":
            return None
        begins, lasts = (np.array([group[i] for group in groups]) for i in (0, -1))
        is_in_one_block = (begins + self.column) // BLOCK == (lasts + self.column) // BLOCK
        codes = self.data.view(np.uint8)
        has_nan = np.logical_or.reduceat(codes & _MAGNITUDE == _NAN, begins, axis=1)
        return Codes(codes, self._scales_at(np.arange(len(codes)), begins), is_in_one_block & ~has_nan)

    def _scales_at(self, rows: Rows, columns: Rows) -> F32:
        """Return f32[n, m]: the scale of every element at some rows and some columns of the part."""
        return self.scales[(self.row + rows[:, None]) // BLOCK, (self.column + columns) // BLOCK]

    def _cut(self, rows: range, columns: range) -> Self:
        data = self.data[rows.start : rows.stop, columns.start : columns.stop]
        return replace(self, data=data, row=self.row + rows.start, column=self.column + columns.start)


class Float8Blocks:
    """The Storage."""

    name = "e4m3, a scale per block of 128 x 128"

    def described(self, where: str, description: Mapping[str, Any]) -> Float8Blocks | None:
        """Of matrices that stayed plain the tensors' own types tell."""
        is_meant = (
            description.get("quant_method") == "fp8"
            and description.get("weight_block_size") == [BLOCK, BLOCK]
            and description.get("fmt", "e4m3") == "e4m3"
            and description.get("activation_scheme", "dynamic") == "dynamic"
        )
        return self if is_meant else None

    def holds(self, source: WeightSource, weight: str) -> bool:
        name = f"{weight}.weight"
        return name in source and source.tensors[name].dtype == _DTYPE and not source.is_transposed(name)

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> Float8Part:
        name = f"{weight}.weight"
        codes = source.tensor(name, shape, (_DTYPE,))
        num_rows, num_columns = (-(-size // BLOCK) for size in shape)
        scales = widen(source.tensor(_scales_name(name), (num_rows, num_columns)))
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{source.path}: scales of {name!r}: expected finite numbers, got others")
        return Float8Part(name, codes, scales)


def _scales_name(name: str) -> str:
    return f"{name}_scale_inv"
