"""Logits of some rows of a step after their requests' rules. Holds NumPy arrays or Paddle tensors and loads neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from fastdeploy_sd.types import I32

A = TypeVar("A", bound=Any)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedLogits(Generic[A]):
    """What replaces some rows of logits where a token is drawn, so that the others need no copy.

    Attributes:
        logits: f32[P, V].
        row_of: i32[L], the row of `logits` that stands for each raw one; -1 = the raw one does.
    """

    logits: A
    row_of: I32

    @staticmethod
    def of(logits: A, rows: I32, num_rows: int) -> ProcessedLogits[A]:
        """Say which rows, i32[P] of num_rows raw ones, the processed ones are."""
        row_of = np.full(num_rows, -1, np.int32)
        row_of[rows] = np.arange(len(rows), dtype=np.int32)
        return ProcessedLogits(logits, row_of)
