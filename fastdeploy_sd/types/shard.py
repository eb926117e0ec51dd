"""Which part of a model a process has. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks, which share a model out among them; the only one by default."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank: expected 0..{self.size - 1}, got {self.rank}")


WHOLE_MODEL = Shard()
