"""Weights stored as the numbers they are: bfloat16, float16, float32 or float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.ops.weight_matrix import FloatPart


class Floats:
    """The Storage."""

    name = "floating-point numbers"

    def described(self, where: str, description: Mapping[str, Any]) -> None:
        return None

    def holds(self, source: WeightSource, weight: str) -> bool:
        return f"{weight}.weight" in source

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> FloatPart:
        name = f"{weight}.weight"
        is_transposed = name in source and source.is_transposed(name)
        return FloatPart(name, source.tensor(name, shape[::-1] if is_transposed else shape), is_transposed)
