"""Percentiles of measured times and the spread between repeats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

RANKS = (50, 90, 99)
Percentiles = dict[str, float]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return {"p50": .., "p90": .., "p99": ..}, linearly interpolated; None of no values."""
    if not values:
        return None
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in RANKS}


def spread(values: Sequence[float]) -> float:
    """Return (largest - smallest) / median: the noise between repeats, 0 for fewer than two."""
    middle = median(values) if values else 0.0
    return (max(values) - min(values)) / middle if len(values) > 1 and middle else 0.0
