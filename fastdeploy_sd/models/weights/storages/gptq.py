"""Weights as GPTQ's tools store them: AutoGPTQ, GPTQModel, AutoRound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages.integers import Groups, IntegerPart, group_indices, num_groups
from fastdeploy_sd.models.weights.storages.packed_integers import PackedIntegers, bits_of_words, in_order

# What was subtracted from zero points. Source: AutoGPTQ, auto_gptq/nn_modules/qlinear; GPTQModel's format "gptq_v2".
_SUBTRACTED = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Gptq:
    """The Storage: words [K / n, N] of integers and [G, N / n] of zero points, scales [G, N], groups of inputs [K].

    A word has n = 32 / bits integers. Bits and groups are those of the tensors: layers may differ.
    """

    subtracted: int = 1

    name = "GPTQ, integers with a scale and a zero point per group"

    def described(self, where: str, description: Mapping[str, Any]) -> Gptq | None:
        if not _is_gptq(description):
            return None
        stored = description.get("checkpoint_format") or "gptq"
        if not isinstance(stored, str) or stored not in _SUBTRACTED:
            expected = " or ".join(_SUBTRACTED)
            raise CheckpointError(f"{where}: checkpoint_format: expected {expected}, got {shown(stored)}")
        return Gptq(_SUBTRACTED[stored])

    def holds(self, source: WeightSource, weight: str) -> bool:
        return f"{weight}.qweight" in source

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> IntegerPart:
        names = [f"{weight}.{role}" for role in ("qweight", "qzeros", "scales")]
        num_rows, num_columns = shape
        groups, bits = num_groups(source, names[2], axis=0), bits_of_words(source, names[0], 0, num_columns)
        order = in_order(bits)
        row_words, column_words = (-(-size // len(order)) for size in shape)
        words = source.tensor(names[0], (column_words, num_rows), ("I32",)).T
        zero_words = source.tensor(names[1], (groups, row_words), ("I32",)).T.view(np.uint32)
        # From whole words, so that a zero point of 0 borrows from the next one.
        zero_words = zero_words + np.uint32(self.subtracted * sum(1 << n * bits for n in order))
        scales = source.tensor(names[2], (groups, num_rows)).T
        integers = PackedIntegers(words, bits, 1, order, 0, num_columns)
        zeros = PackedIntegers(zero_words, bits, 0, order, 0, num_rows)
        group_of = group_indices(source, f"{weight}.g_idx", num_columns, groups)
        return IntegerPart.create(weight, integers, Groups(scales, zeros, 0), group_of, names)


def _is_gptq(description: Mapping[str, Any]) -> bool:
    method = description.get("quant_method")
    if method == "auto-round":
        return description.get("packing_format") in ("auto_round:auto_gptq", "auto_round:gptq")
    # quantize_config.json of AutoGPTQ names no method.
    return method == "gptq" or (method is None and "desc_act" in description)
