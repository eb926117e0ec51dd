"""Orders of a matrix's inputs in which those that share a scale are neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.ops.group_format import UNIT
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.ranges import SliceRule

# What kernels multiply without eight bits per code.
_SHORTEST_GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class InputOrder:
    """An order of inputs.

    Attributes:
        inputs: i32[K'], which input each column multiplies; -1 = none, where a group ends early.
        group: columns that share a scale.
        slices: how a sum over the columns is cut: its slices have the inputs of those that it was made for.
    """

    inputs: I32
    group: int
    slices: SliceRule

    def is_same(self, other: InputOrder) -> bool:
        return self.group == other.group and np.array_equal(self.inputs, other.inputs)


def by_group(group_of: I32, group_size: int, slices: SliceRule) -> InputOrder:
    """Return the order of inputs by their groups i32[K]; within a group they keep their order.

    A slice has an order of its own, so that ranks which have slices of a sum add up the same numbers. It has any number
    of a group's inputs, which columns of no input fill up to a multiple of 32.
    """
    is_whole = slices.of_all_ranks.count == 1
    is_even = is_whole and not (np.bincount(group_of) % group_size).any()
    size = group_size if is_even else min(group_size, _SHORTEST_GROUP)
    pieces = [_sorted(group_of, piece, size) for piece in slices.ranges(len(group_of))]
    width = max(map(len, pieces))
    if not is_whole:
        width = -(-width // UNIT) * UNIT
    inputs = np.full((len(pieces), width), -1, np.int32)
    for row, piece in zip(inputs, pieces, strict=True):
        row[: len(piece)] = piece
    return InputOrder(inputs.reshape(-1), size, SliceRule(slices.count, max(width, 1), slices.num_ranks))


def _sorted(group_of: I32, piece: range, size: int) -> I32:
    """Return inputs of a piece group by group, each group in a multiple of `size` columns."""
    own = group_of[piece.start : piece.stop]
    counts = np.bincount(own)
    room = -(-counts // size) * size
    inputs = np.full(room.sum(), -1, np.int32)
    # Where each input of a sorted piece comes to lie: moved by the room that the groups before it leave empty.
    places = np.arange(len(own)) + np.repeat((room - counts).cumsum() - (room - counts), counts)
    inputs[places] = np.argsort(own, kind="stable") + piece.start
    return inputs
