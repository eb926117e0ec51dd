"""Cosines and sines of the rotary embedding. NumPy, float64 until the end; knows no kernel and no file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import F32, F64

# Rows at once: the float64 angles are several times the table.
_CHUNK = 8192


class RopeScaling(Protocol):
    """How inverse frequencies are changed for a longer context than the one that was trained first."""

    def scale(self, inverse: F64, theta: float) -> tuple[F64, float]:
        """f64[rotary_dim / 2] -> the same, scaled, and what cosines and sines are multiplied by."""
        ...


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every pair turns `factor` times more slowly. Source: arXiv:2306.15595."""

    factor: float

    def scale(self, inverse: F64, theta: float) -> tuple[F64, float]:
        del theta
        return inverse / self.factor, 1.0


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Every pair turns more slowly by its own factor; `amplitude`: of cosines and sines."""

    factors: tuple[float, ...]
    amplitude: float = 1.0

    def scale(self, inverse: F64, theta: float) -> tuple[F64, float]:
        del theta
        return inverse / np.array(self.factors), self.amplitude


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A factor for every pair, other ones where sequences may be longer than the first context.

    Source: arXiv:2402.13753.
    """

    short: FactorScaling
    long: FactorScaling
    original_max_position: int

    def of_length(self, max_length: int) -> FactorScaling:
        """Return the factors of a server whose sequences have at most max_length tokens."""
        return self.long if max_length > self.original_max_position else self.short


def longrope_amplitude(factor: float, original_max_position: int) -> float:
    """Return LongRoPE's amplitude for a context `factor` times as long."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position))


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries grow by beta * ln(1 + n) at positions of n whole original contexts or more, as in Ministral 3."""

    beta: float
    original_max_position: int

    def factors(self, max_position: int) -> F32:
        """Return f32[max_position]."""
        contexts = np.arange(max_position) // self.original_max_position
        return (1 + self.beta * np.log1p(contexts)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Keep short wavelengths, stretch long ones, blend between. Source: the Llama 3.1 release."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scale(self, inverse: F64, theta: float) -> tuple[F64, float]:
        del theta
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position * inverse / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return inverse * (kept + (1 - kept) / self.factor), 1.0


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Keep pairs that turn more than beta_fast times in the original context, stretch those below beta_slow.

    The bounds between the two kinds are whole pairs if `truncate`; `amplitude`: see `yarn_amplitude`.

    Source: arXiv:2309.00071.
    """

    factor: float
    original_max_position: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, inverse: F64, theta: float) -> tuple[F64, float]:
        rotary_dim = 2 * len(inverse)

        def pair_with(turns: float) -> float:
            return rotary_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
        # The width is kept above zero, as in the published code.
        stretched = np.clip((np.arange(len(inverse)) - low) / max(high - low, 0.001), 0.0, 1.0)
        return inverse * ((1 - stretched) + stretched / self.factor), self.amplitude


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's amplitude for a factor; `mscale` weighs its logarithm."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_table(max_position: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> F32:
    """Build the table f32[max_position, rotary_dim] that `rope_store_kv_` reads.

    Row p holds the cosines, then the sines, of p * inverse frequency. Pair i turns with inverse frequency
    theta^(-2i / rotary_dim) before scaling. Raises ConfigError: rotary_dim is odd.

    Source: arXiv:2104.09864.
    """
    if rotary_dim <= 0 or rotary_dim % 2 != 0:
        raise ConfigError(f"rotary_dim: expected a positive even number, got {rotary_dim}")
    inverse, amplitude = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim), 1.0
    if scaling is not None:
        inverse, amplitude = scaling.scale(inverse, theta)
    table = np.empty((max_position, rotary_dim), np.float32)
    for begin in range(0, max_position, _CHUNK):
        rows = table[begin : begin + _CHUNK]
        angles = np.outer(np.arange(begin, begin + len(rows), dtype=np.float64), inverse)
        np.cos(angles, out=rows[:, : len(inverse)], casting="same_kind")
        np.sin(angles, out=rows[:, len(inverse) :], casting="same_kind")
        rows *= np.float32(amplitude)
    return table
