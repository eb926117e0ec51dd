"""Weights stored in blocks of GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES, BlockType
from fastdeploy_sd.ops.group_format import GROUP_FORMATS, GroupFormat
from fastdeploy_sd.ops.weight_matrix import Factors, Integers, WeightPart
from fastdeploy_sd.types import F32, U8


@dataclass(frozen=True, slots=True, eq=False)
class BlockPart(WeightPart):
    """A part stored as u8[N, bytes of the blocks that hold its columns].

    Attributes:
        begin, end: its columns within those blocks.
    """

    block: BlockType
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.end - self.begin

    @property
    def group_format(self) -> GroupFormat:
        return GROUP_FORMATS[self.block.fmt]

    @property
    def first_column(self) -> int:
        return self.begin

    def blocks(self, rows: slice) -> U8:
        """Return u8[B, bytes of a block], one output after the other."""
        return self.data[rows].reshape(-1, self.block.num_bytes).view(np.uint8)

    def integers(self, rows: slice) -> Integers:
        num_rows, found = len(self.data[rows]), self.block.unpack(self.blocks(rows))
        scales, minima = found.scales, found.minima
        if not all(np.isfinite(factors.steps).all() for factors in (scales, minima) if factors is not None):
            raise CheckpointError(f"{self.name}: expected finite scales and minima, got others")

        def by_row(factors: Factors) -> Factors:
            counts = None if factors.counts is None else factors.counts.reshape(num_rows, -1)
            return Factors(factors.steps.reshape(num_rows, -1), counts)

        codes = found.codes.reshape(num_rows, -1)
        whole = Integers(codes, by_row(scales), None if minima is None else by_row(minima))
        return whole.columns(range(self.begin, self.end))

    def values(self) -> F32:
        return self.integers(slice(None)).numbers()

    def _cut(self, rows: range, columns: range) -> Self:
        size, begin, end = self.block.size, self.begin + columns.start, self.begin + columns.stop
        first, last = begin // size, -(-end // size)
        part = self._cut_blocks(slice(rows.start, rows.stop), first, last)
        return replace(part, begin=begin - first * size, end=end - first * size)

    def _cut_blocks(self, rows: slice, first: int, last: int) -> Self:
        num_bytes = self.block.num_bytes
        return replace(self, data=self.data[rows, first * num_bytes : last * num_bytes])


class GgufBlocks:
    """The Storage."""

    name = "GGUF blocks"

    def described(self, where: str, description: Mapping[str, Any]) -> None:
        """The tensors' own types tell."""
        return None

    def holds(self, source: WeightSource, weight: str) -> bool:
        name = f"{weight}.weight"
        return name in source and source.tensors[name].dtype in BLOCK_TYPES

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> BlockPart:
        name = f"{weight}.weight"
        data = source.tensor(name, shape, BLOCK_TYPES)
        return BlockPart(name, data, BLOCK_TYPES[source.tensors[name].dtype], 0, shape[1])
