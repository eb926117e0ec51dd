"""Means with their intervals, and how far two distributions over a vocabulary are apart. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_sd.types import F32, F64

# Of the normal distribution: 95 % of it lie within so many standard deviations.
_DEVIATIONS = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half of its 95 % interval, from the standard error over scored tokens."""

    mean: float
    margin: float

    @classmethod
    def of(cls, values: F64) -> Estimate:
        """Estimate the mean of what values f64[n] were drawn from; one value says nothing of its margin: NaN."""
        n = len(values)
        return cls(float(values.mean()), _DEVIATIONS * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan)

    def times(self, factor: float) -> Estimate:
        """Return the estimate in another unit."""
        return Estimate(self.mean * factor, self.margin * factor)

    def to_json(self) -> dict[str, Any]:
        """Return both numbers by name."""
        return {"mean": self.mean, "margin_95": self.margin}


def log_softmax(logits: F32) -> F32:
    """f32[n, V] -> natural logarithms of the probabilities of each row; sums are in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    logprobs: F32 = (shifted - totals).astype(np.float32)
    return logprobs


def kl_divergence(reference: F32, other: F32) -> F64:
    """Return KL(reference || other) of each row, in nats: f64[n] of log-probabilities f32[n, V].

    A token that is impossible in the reference adds nothing.
    """
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(reference), np.float32(0), np.exp(reference) * (reference - other))
    divergence: F64 = terms.sum(axis=1, dtype=np.float64)
    return divergence
