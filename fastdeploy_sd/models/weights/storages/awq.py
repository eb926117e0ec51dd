"""Weights as AutoAWQ stores them in its layout "gemm"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages.integers import Groups, IntegerPart, num_groups
from fastdeploy_sd.models.weights.storages.packed_integers import PackedIntegers

_BITS = 4
# Source: AutoAWQ, awq/modules/linear/gemm.py.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq:
    """The Storage: words [K, N / 8] of integers and [G, N / 8] of zero points, scales [G, N]."""

    name = "AWQ, integers of 4 bits with a scale and a zero point per group"

    def described(self, where: str, description: Mapping[str, Any]) -> Awq | None:
        # quant_config.json of AutoAWQ names no method.
        if description.get("quant_method", "awq" if "q_group_size" in description else None) != "awq":
            return None
        bits, version = description.get("bits", description.get("w_bit", _BITS)), description.get("version", "gemm")
        if bits != _BITS:
            raise CheckpointError(f"{where}: bits: expected {_BITS} of AWQ, got {shown(bits)}")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise CheckpointError(f"{where}: version: expected AWQ's layout gemm, got {shown(version)}")
        return self

    def holds(self, source: WeightSource, weight: str) -> bool:
        return f"{weight}.qweight" in source

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> IntegerPart:
        names = tuple(f"{weight}.{role}" for role in ("qweight", "qzeros", "scales"))
        num_rows, num_columns = shape
        num_words = -(-num_rows // len(_ORDER))
        groups = num_groups(source, names[2], axis=0)
        words, zero_words = (
            source.tensor(name, (size, num_words), ("I32",)).T
            for name, size in zip(names, (num_columns, groups), strict=False)
        )
        scales = source.tensor(names[2], (groups, num_rows)).T
        integers, zeros = (PackedIntegers(data, _BITS, 0, _ORDER, 0, num_rows) for data in (words, zero_words))
        return IntegerPart.create(weight, integers, Groups(scales, zeros, 0), None, names)
