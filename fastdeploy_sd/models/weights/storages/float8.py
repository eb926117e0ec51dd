"""Weights stored as e4m3 with a scale per block of 128 x 128, per output or for all, whatever tool stored them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import ONE_NUMBER, WeightSource
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import input_groups
from fastdeploy_sd.ops.weight_matrix import Codes, WeightPart
from fastdeploy_sd.types import F32, Rows
from fastdeploy_sd.types.ranges import SliceRule

BLOCK = 128
_DTYPE = "F8_E4M3"
_MAGNITUDE, _NAN = 0x7F, 0x7F
_ROWS_AT_ONCE = 64  # that are looked through for a NaN


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

    Attributes:
        scales: f32, one per block of the whole weight, in which the part begins at (row, column).
        block: outputs and inputs of a block; the last ones may be cut off.
    """

    scales: F32
    from_tensors: tuple[str, ...] = ()
    block: tuple[int, int] = (BLOCK, BLOCK)
    row: int = 0
    column: int = 0

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.from_tensors

    def values(self) -> F32:
        num_rows, num_columns = self.shape
        return _VALUES[self.data.view(np.uint8)] * self._scales_at(np.arange(num_rows), np.arange(num_columns))

    def code_format(self, slices: SliceRule) -> LinearFormat | None:
        return "e4m3" if self._is_in_one_block(input_groups(self.shape[1], slices)).all() else None

    def codes(self, fmt: LinearFormat, slices: SliceRule) -> Codes | None:
        """See WeightPart.codes. A group with inputs of two blocks is not exact, nor is one with a NaN."""
        if fmt not in ("fp8", "e4m3"):
            return None
        groups = input_groups(self.shape[1], slices)
        begins = np.array([group[0] for group in groups])
        codes, has_nan = self.data.view(np.uint8), np.empty((self.shape[0], len(groups)), np.bool_)
        for row in range(0, len(codes), _ROWS_AT_ONCE):
            own = slice(row, row + _ROWS_AT_ONCE)
            has_nan[own] = np.logical_or.reduceat(codes[own] & _MAGNITUDE == _NAN, begins, axis=1)
        scales = self._scales_at(np.arange(len(codes)), begins)
        return Codes(lambda rows: codes[rows.start : rows.stop], scales, self._is_in_one_block(groups) & ~has_nan)

    def _is_in_one_block(self, groups: Sequence[range]) -> npt.NDArray[np.bool_]:
        begins, lasts = (self.column + np.array([group[i] for group in groups]) for i in (0, -1))
        same: npt.NDArray[np.bool_] = begins // self.block[1] == lasts // self.block[1]
        return same

    def _scales_at(self, rows: Rows, columns: Rows) -> F32:
        """Return f32[n, m]: the scale of every element at some rows and some columns of the part."""
        height, width = self.block
        return self.scales[(self.row + rows[:, None]) // height, (self.column + columns) // width]

    def _cut(self, rows: range, columns: range) -> Self:
        data = self.data[rows.start : rows.stop, columns.start : columns.stop]
        return replace(self, data=data, row=self.row + rows.start, column=self.column + columns.start)


class Float8:
    """The Storage: e4m3 [N, K]; scales [N / 128, K / 128], [N, K / n], [N] or one."""

    name = "e4m3, a scale per block of 128 x 128, output or tensor"

    def described(self, where: str, description: Mapping[str, Any]) -> Float8 | None:
        """Of matrices that stayed plain the tensors' own types tell."""
        method, algorithm = description.get("quant_method"), description.get("quant_algo")
        if method not in ("fp8", "fbgemm_fp8") and not (method in ("modelopt", None) and algorithm == "FP8"):
            return None
        block, codes = description.get("weight_block_size"), description.get("fmt", "e4m3")
        if block not in (None, [BLOCK, BLOCK]):
            raise CheckpointError(f"{where}: weight_block_size: expected [{BLOCK}, {BLOCK}], got {shown(block)}")
        if codes != "e4m3":
            raise CheckpointError(f"{where}: fmt: expected e4m3, got {shown(codes)}")
        return self

    def holds(self, source: WeightSource, weight: str) -> bool:
        name = f"{weight}.weight"
        return name in source and source.tensors[name].dtype == _DTYPE and not source.is_transposed(name)

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> Float8Part:
        name, (num_rows, num_columns) = f"{weight}.weight", shape
        codes = source.tensor(name, shape, (_DTYPE,))
        scales_name = f"{name}_scale" if f"{name}_scale" in source else f"{name}_scale_inv"
        found = source.shape(scales_name) if scales_name in source else ()
        wanted: tuple[int, ...]
        wanted, block = (-(-num_rows // BLOCK), -(-num_columns // BLOCK)), (BLOCK, BLOCK)
        if found == wanted:
            pass
        elif found in ONE_NUMBER:
            wanted, block = found, shape
        elif found in ((num_rows,), (num_rows, 1)):
            wanted, block = found, (1, num_columns)
        elif len(found) == len(shape) and found[0] == num_rows and num_columns % max(found[1], 1) == 0 < found[1]:
            wanted, block = found, (1, num_columns // found[1])
        scales = widen(source.tensor(scales_name, wanted))
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{source.path}: scales of {name!r}: expected finite numbers, got others")
        tall, wide = -(-num_rows // block[0]), -(-num_columns // block[1])
        return Float8Part(name, codes, scales.reshape(tall, wide), (name, scales_name), block)
