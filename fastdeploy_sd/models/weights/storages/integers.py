"""Weights stored as integers with a scale and a zero point per group: AWQ, GPTQ and others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.source import Weights, WeightSource
from fastdeploy_sd.models.weights.storages.factors import factors_of
from fastdeploy_sd.models.weights.storages.packed_integers import PackedIntegers
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.group_format import UNIT, GroupFormat
from fastdeploy_sd.ops.input_order import InputOrder, by_group
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import input_groups
from fastdeploy_sd.ops.weight_matrix import Codes, Factors, Integers, WeightPart
from fastdeploy_sd.types import F32, I32, U8
from fastdeploy_sd.types.ranges import SliceRule

I16 = npt.NDArray[np.int16]
_BYTE = 8
_BITS_OF_FACTORS = 4  # of wint4's codes
# By the bits of an integer.
_CODE_FORMATS: Mapping[int, LinearFormat] = {_BITS_OF_FACTORS: "wint4", _BYTE: "wint8"}


def num_groups(source: WeightSource, name: str, axis: int) -> int:
    """Return the groups of a tensor of scales along an axis; raises CheckpointError: missing, or no matrix."""
    shape = source.shape(name) if name in source else ()
    if len(shape) != len(("outputs", "groups")) or min(shape) < 1:
        found = f"shape {shape}" if name in source else "none"
        raise CheckpointError(f"{source.path}: tensor {name!r}: expected a scale per output and group, got {found}")
    return shape[axis]


def group_indices(source: WeightSource, name: str, num_columns: int, num_groups: int) -> I32 | None:
    """Return the group of each input, None where there is no such tensor; raises CheckpointError: no such group."""
    if name not in source:
        return None
    group_of = source.tensor(name, (num_columns,), ("I32",)).astype(np.int32)
    if not ((group_of >= 0) & (group_of < num_groups)).all():
        wrong = group_of[(group_of < 0) | (group_of >= num_groups)][0]
        raise CheckpointError(
            f"{source.path}: tensor {name!r}: expected groups from 0 to {num_groups - 1}, got {wrong}"
        )
    return group_of


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """What the inputs of a group share.

    Attributes:
        scales: [N, G].
        zeros: [N, G], integers along axis 0, to which `zero_offset` is added; None = zeros.
    """

    scales: Weights
    zeros: PackedIntegers | None
    zero_offset: int

    def cut(self, rows: range, groups: range) -> Groups:
        scales = self.scales[rows.start : rows.stop, groups.start : groups.stop]
        return replace(self, scales=scales, zeros=None if self.zeros is None else self.zeros.cut(rows, groups))

    def repeated(self, times: int) -> Groups:
        """Return those of so many groups instead of one."""
        rows = len(self.scales)
        zeros = self.zeros
        if zeros is not None:
            zeros = replace(zeros, words=np.broadcast_to(zeros.words, (len(zeros.words), times)))
        return replace(self, scales=np.broadcast_to(self.scales, (rows, times)), zeros=zeros)

    def picked(self, groups: I32) -> Groups:
        """Return some of the groups, in this order."""
        zeros = None if self.zeros is None else replace(self.zeros, words=self.zeros.words[:, groups])
        return replace(self, scales=self.scales[:, groups], zeros=zeros)

    def zero_points(self) -> I16:
        """Return i16[N, G]."""
        if self.zeros is None:
            return np.full(self.scales.shape, self.zero_offset, np.int16)
        return self.zeros.read().astype(np.int16) + np.int16(self.zero_offset)

    def format(self, name: str, bits: int, group: int) -> GroupFormat:
        """Return how integers of so many bits are held; raises CheckpointError: a scale is not finite."""
        scales = widen(self.scales)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"tensor {name!r}: expected finite scales, got others")
        with np.errstate(over="ignore"):
            is_half = np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
        middle = 1 << (bits - 1)
        is_symmetric = (self.zero_points() == middle).all()
        return GroupFormat(bits, group, "half" if is_half else "float", "none" if is_symmetric else "zeros", middle)


@dataclass(frozen=True, slots=True, eq=False)
class IntegerPart(WeightPart):
    """A part whose weights are (integer - zero point) * scale; its `data` are the words of the integers.

    Attributes:
        group_size: inputs of a group; its columns begin at input `begin` of the first group.
        group_of: i32[K], the group of each input, where a group's inputs are no neighbours.
        held: its `group_format`.
        from_tensors: its `tensors`.
        whole: what it was cut from, None = nothing was cut off.
    """

    integers_of: PackedIntegers
    groups: Groups
    group_size: int
    group_of: I32 | None
    held: GroupFormat
    from_tensors: tuple[str, ...]
    begin: int = 0
    whole: IntegerPart | None = None

    @classmethod
    def create(
        cls, name: str, integers: PackedIntegers, groups: Groups, group_of: I32 | None, tensors: Sequence[str]
    ) -> Self:
        """Return a whole weight.

        Raises CheckpointError: scales are not finite, or groups are of several sizes or none that is read.
        """
        num_columns, num_groups = integers.shape[1], groups.scales.shape[1]
        size, rest = divmod(num_columns, max(num_groups, 1))
        if num_groups == 1:  # of a row: any size is one of its groups
            size, group_of = math.gcd(num_columns, UNIT), None
            groups = groups.repeated(num_columns // size)
        elif num_groups < 1 or rest or size & (size - 1):  # as are groups of which the last is short
            expected = "groups of a power of two of inputs"
            raise CheckpointError(f"tensor {name!r}: expected {expected}, got {num_groups} of {num_columns} inputs")
        if group_of is not None and np.array_equal(group_of, np.arange(num_columns) // size):
            group_of = None
        held = groups.format(name, integers.bits, 1 if group_of is not None else size)
        return cls(name, integers.words, integers, groups, size, group_of, held, tuple(tensors))

    @property
    def shape(self) -> tuple[int, int]:
        return self.integers_of.shape

    @property
    def num_bytes(self) -> int:
        arrays = [self.data, self.groups.scales, *([] if self.groups.zeros is None else [self.groups.zeros.words])]
        # A row's one scale, repeated for its groups, has a stride of zero.
        return sum(array.nbytes for array in arrays if 0 not in array.strides)

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.from_tensors

    @property
    def group_format(self) -> GroupFormat:
        return self.held

    @property
    def first_column(self) -> int:
        return self.begin

    def code_format(self, slices: SliceRule) -> LinearFormat | None:
        return None if self._group_values(slices) is None else _CODE_FORMATS[self.integers_of.bits]

    def codes(self, fmt: LinearFormat, slices: SliceRule) -> Codes | None:
        """See WeightPart.codes."""
        if fmt != _CODE_FORMATS.get(self.integers_of.bits) or (found := self._group_values(slices)) is None:
            return None
        scales, factors = found
        own, columns = self.integers_of, range(self.shape[1])
        return Codes(lambda rows: own.cut(rows, columns).read(), scales, np.ones(scales.shape, np.bool_), factors)

    def _group_values(self, slices: SliceRule) -> tuple[F32, U8 | None] | None:
        """Return the scales and, of wint4, the factors of `Codes`.

        None where codes do not hold the part exactly, or not all of what it was cut from.
        """
        if self.group_of is not None or (self.whole and self.whole.code_format(slices.of_all_ranks) is None):
            return None
        groups = input_groups(self.shape[1], slices)
        if self.integers_of.bits == _BITS_OF_FACTORS:
            own = [range(self.begin + group.start, self.begin + group.stop) for group in groups]
            return factors_of(own, self.group_size, widen(self.groups.scales), self.groups.zero_points())
        if self.integers_of.bits != _BYTE or self.held.minimum != "none":
            return None
        scales, have_one = self._scales_of(groups)
        return (scales, None) if have_one.all() else None

    def _scales_of(self, groups: Sequence[range]) -> tuple[F32, npt.NDArray[np.bool_]]:
        """Return a scale f32[N, G] per group of inputs, and whether all of the group have it."""
        scales = widen(self.groups.scales)
        firsts = np.array([(self.begin + group.start) // self.group_size for group in groups])
        lasts = np.array([(self.begin + group.stop - 1) // self.group_size for group in groups])
        is_new = np.diff(scales, axis=1, prepend=scales[:, :1]) != 0
        changes = is_new.cumsum(axis=1)
        return scales[:, firsts], changes[:, firsts] == changes[:, lasts]

    def integers(self, rows: slice) -> Integers:
        part = self.rows(*rows.indices(self.shape[0])[:2])
        num_columns, middle = part.shape[1], self.held.zero
        # Groups of one size, that of the part's first and last ones included.
        size = math.gcd(part.group_size, part.begin, num_columns)
        group_of = (part.begin + np.arange(0, num_columns, size)) // part.group_size
        scales = widen(part.groups.scales)[:, group_of]
        codes = (part.integers_of.read() - np.uint8(middle)).view(np.int8)
        if self.held.minimum == "none":
            return Integers(codes, Factors(scales))
        zeros = part.groups.zero_points()[:, group_of] - np.int16(middle)
        return Integers(codes, Factors(scales), Factors(scales, zeros.astype(np.int8)))

    def values(self) -> F32:
        group_of = self.group_of
        if group_of is None:
            group_of = (self.begin + np.arange(self.shape[1], dtype=np.int32)) // self.group_size
        differences = self.integers_of.read() - self.groups.zero_points()[:, group_of]
        return differences * widen(self.groups.scales)[:, group_of]

    def input_order(self, slices: SliceRule) -> InputOrder | None:
        return None if self.group_of is None else by_group(self.group_of, self.group_size, slices)

    def in_order(self, order: InputOrder) -> Self:
        assert self.group_of is not None
        whole = self.whole
        if order.slices.of_all_ranks.count > 1:
            # Ranks have orders of their own. A whole with no codes keeps all of them to the same format.
            whole = whole or self
        elif whole and whole.shape[1] == self.shape[1]:
            whole = whole.in_order(order)
        return replace(
            self,
            integers_of=replace(self.integers_of, picked=order.inputs),
            groups=self.groups.picked(self.group_of[order.inputs[:: order.group]]),
            group_size=order.group,
            group_of=None,
            held=replace(self.held, group=order.group),
            whole=whole,
        )

    def _cut(self, rows: range, columns: range) -> Self:
        integers, whole = self.integers_of.cut(rows, columns), self.whole or self
        if self.group_of is not None:
            groups = self.groups.cut(rows, range(self.groups.scales.shape[1]))
            group_of = self.group_of[columns.start : columns.stop]
            part = replace(self, data=integers.words, integers_of=integers, groups=groups, whole=whole)
            return replace(part, group_of=group_of)
        begin, end = self.begin + columns.start, self.begin + columns.stop
        first = begin // self.group_size
        groups = self.groups.cut(rows, range(first, -(-end // self.group_size)))
        begin -= first * self.group_size
        return replace(self, data=integers.words, integers_of=integers, groups=groups, begin=begin, whole=whole)
