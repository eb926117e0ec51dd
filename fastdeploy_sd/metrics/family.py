"""A metric that is computed from EngineStats: name, meaning and value. Knows no exposition format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastdeploy_sd.types.stats import EngineStats

Value = Callable[[EngineStats], float | None]
LabelledValues = Callable[[EngineStats], Mapping[str, float]]
LabelsValues = Callable[[EngineStats], Mapping[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Single:
    """A metric with one value; None = no sample.

    Attributes:
        name: of a counter without the `_total` that exposition appends.
    """

    name: str
    text: str
    value: Value


@dataclass(frozen=True, slots=True)
class Labelled:
    """A counter or gauge with one value per value of one label."""

    name: str
    text: str
    label: str
    values: LabelledValues


@dataclass(frozen=True, slots=True)
class ByLabels:
    """A counter with one value per values of several labels."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: LabelsValues


@dataclass(frozen=True, slots=True)
class ByPosition:
    """A counter of drafts with two labels: whose they were, and their position in the draft (0 = first)."""

    name: str
    text: str
    label: str
    values: Callable[[EngineStats], Mapping[str, tuple[int, ...]]]


def ratio(numerator: float, denominator: float) -> float | None:
    """Quotient, None when nothing has been counted yet."""
    return numerator / denominator if denominator else None
