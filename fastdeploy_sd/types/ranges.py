"""How a dimension is cut into slices, which ranks share out: the arithmetic of the fixed tree. Knows no tensors.

A sum over K inputs is cut into 1, 2 or 4 slices. Each is summed in order, and the slices' sums are added as a binary
tree, whose lower part a rank has for itself; custom_ops/cpu/kernels/shared/linear.cc does the same:

    4 slices     (s0 + s1) + (s2 + s3)
    2 ranks       rank 0   +  rank 1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

COUNTS = (4, 2, 1)


@dataclass(frozen=True, slots=True)
class SliceRule:
    """How a dimension is cut: `count` slices, 1, 2 or 4, that begin at multiples of `unit`. One slice is the whole.

    Attributes:
        num_ranks: among which the dimension was shared out; the rule is for what one of them has.
    """

    count: int = 1
    unit: int = 1
    num_ranks: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        if self.count not in COUNTS or self.unit < 1:
            raise ValueError(f"slices: expected a count of 1, 2 or 4 and a unit of 1 or more, got {self}")

    def ranges(self, size: int) -> tuple[range, ...]:
        """Return the slices of a dimension."""
        return halved(size, self.count, self.unit)

    def of_rank(self, num_ranks: int) -> SliceRule:
        """Return the rule for what one of the ranks has, a divisor of `count` of them: halving goes on in its range."""
        return SliceRule(self.count // num_ranks, self.unit, self.num_ranks * num_ranks)

    @property
    def of_all_ranks(self) -> SliceRule:
        """The rule for the whole dimension."""
        return SliceRule(self.count * self.num_ranks, self.unit)


# A sum in one piece.
WHOLE = SliceRule()


def halved(size: int, count: int, unit: int) -> tuple[range, ...]:
    """Cut 0..size into `count` ranges, a power of two, by halving again and again.

    Of n units the left half gets n // 2; the last unit may be short, and ranges may be empty.
    """
    bounds = [0, -(-size // unit)]
    while len(bounds) <= count:
        middles = [begin + (end - begin) // 2 for begin, end in pairwise(bounds)]
        bounds = sorted([*bounds, *middles])
    places = [min(bound * unit, size) for bound in bounds]
    return tuple(range(begin, end) for begin, end in pairwise(places))
