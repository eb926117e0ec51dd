"""What is known of experts that are spread over ranks. Their layers are numbered: the target's, then drafters'."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Counters since the start, and gauges of now.

    Attributes:
        num_rows: rank -> the rows on which it has run its experts, by layer; of the ranks of one engine.
        balancedness: layer -> mean rows of all ranks by the greatest in the last seconds; only layers that had rows.
            Only the first engine tells it.
        num_moves: copies of experts that have come to a rank. num_moving: those on their way.
    """

    num_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    balancedness: dict[int, float] = field(default_factory=dict)
    num_moves: int = 0
    num_moving: int = 0


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Of all ranks, as of now.

    Attributes:
        is_moving: a placement is being computed or reached.
        num_rows: of each layer's experts.
        placement: layer -> rank -> the experts in its slots, -1 = none.
        is_reached: of each rank: whether it has the experts that it shall have.
    """

    is_moving: bool
    num_rows: tuple[tuple[int, ...], ...]
    placement: tuple[tuple[tuple[int, ...], ...], ...]
    is_reached: tuple[bool, ...]
