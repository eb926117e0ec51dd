"""What lora_shrink and lora_expand_ take of a linear layer: NumPy arrays or Paddle tensors alike, loading neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

A = TypeVar("A", bound=Any)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSlots(Generic[A]):
    """Low-rank adapters of a linear layer [N, K] of P parts along N: S slots, each of an adapter of at most rank R.

    Attributes:
        a: f32, bf16 or f16 [S, P * R, K], part by part.
        b: the same dtype [S, R, N], the transpose of each part's matrix.
        ranks: i32[S, P], 0 = the adapter leaves the part as it is. What lies beyond a rank is not read.
        scales: f32[S, P], what the parts' products are multiplied by.
        part_ends: i32[P], rising; the last is N.
    """

    a: A
    b: A
    ranks: A
    scales: A
    part_ends: A
