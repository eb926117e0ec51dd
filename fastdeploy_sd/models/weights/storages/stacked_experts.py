"""Stacked experts: those of gpt-oss as numbers or in blocks of MXFP4, and those of Qwen3.5 as numbers.

Rows of gate and up take turns in gpt-oss's, whose numbers are stored [E, in, out]. Qwen's are stored [E, out, in], all
rows of gate before those of up. gpt-oss's have biases, which tells them apart.

Source: openai/gpt-oss, gpt_oss/torch/weights.py (blocks); transformers, models/gpt_oss (names).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages.gguf import BlockPart
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightPart
from fastdeploy_sd.types import U8

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_blocks)?")
_PLACE = re.compile(r"\[(\d+)\]\.(gate_proj|up_proj|down_proj)")
_BLOCK = BLOCK_TYPES["MXFP4"]
_SCALE_OF_NO_NUMBER = 255


@dataclass(frozen=True, slots=True, eq=False)
class ViewPart(WeightPart):
    """Numbers [N, K] that lie in any order; they are copied when they are packed."""

    def numbers(self) -> FloatPart:
        return FloatPart(self.name, np.ascontiguousarray(self.data), place=self.place)

    def _cut(self, rows: range, columns: range) -> Self:
        return replace(self, data=self.data[rows.start : rows.stop, columns.start : columns.stop])


@dataclass(frozen=True, slots=True, eq=False)
class MicroscaledPart(BlockPart):
    """Blocks u8[N, B, 16] of 32 inputs, two neighbours in a byte, and exponents of their scales u8[N, B]."""

    scales: U8
    scale_name: str

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.name, self.scale_name

    def blocks(self, rows: slice) -> U8:
        data, scales = np.asarray(self.data[rows], np.uint8), self.scales[rows]
        if (scales == _SCALE_OF_NO_NUMBER).any():
            raise CheckpointError(f"{self.scale_name}: expected exponents below 255, which is no number, got it")
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(-1, _BLOCK.size)
        # GGUF's blocks have input i and i + 16 in a byte.
        halves = nibbles[:, : _BLOCK.size // 2] | nibbles[:, _BLOCK.size // 2 :] << 4
        return np.concatenate([scales.reshape(-1, 1), halves], axis=1)

    def _cut_blocks(self, rows: slice, first: int, last: int) -> Self:
        return replace(self, data=self.data[rows, first:last], scales=self.scales[rows, first:last])


class StackedExperts:
    """The Storage."""

    name = "MXFP4 of stacked experts"

    def described(self, where: str, description: Mapping[str, Any]) -> StackedExperts | None:
        return self if description.get("quant_method") == "mxfp4" else None

    def holds(self, source: WeightSource, weight: str) -> bool:
        match = _EXPERT.fullmatch(weight)
        return match is not None and any(name in source for name in (_stack(match), f"{_stack(match)}_blocks"))

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> WeightPart:
        match = _EXPERT.fullmatch(weight)
        assert match is not None
        stack, expert, role = _stack(match), int(match[2]), match[3]
        num_rows, num_columns = shape
        is_down = role == "down_proj"
        rows = slice(None) if is_down else slice(int(role == "up_proj"), None, 2)
        total, place = num_rows if is_down else 2 * num_rows, f"[{expert}].{role}"
        blocks, scales = f"{stack}_blocks", f"{stack}_scales"
        num_experts = source.shape(blocks if blocks in source else stack)[0]
        if expert >= num_experts:
            raise CheckpointError(
                f"{source.path}: tensor {stack!r}: expected more than {expert} experts, got {num_experts}"
            )
        if blocks not in source:
            if f"{stack}_bias" in source:
                numbers = source.tensor(stack, (num_experts, num_columns, total))
                return ViewPart(stack, numbers[expert].T[rows], place=place)
            numbers = source.tensor(stack, (num_experts, total, num_columns))
            begin = num_rows if role == "up_proj" else 0
            return FloatPart(stack, numbers[expert][begin : begin + num_rows], place=place)
        if num_columns % _BLOCK.size:
            raise CheckpointError(
                f"{source.path}: tensor {blocks!r}: expected blocks of {_BLOCK.size} of {num_columns}"
            )
        count = num_columns // _BLOCK.size
        data = source.tensor(blocks, (num_experts, total, count, _BLOCK.size // 2), ("U8",))
        exponents = np.asarray(source.tensor(scales, (num_experts, total, count), ("U8",)), np.uint8)
        return MicroscaledPart(
            blocks, data[expert][rows], _BLOCK, 0, num_columns, exponents[expert][rows], scales, place=place
        )


def weight_name(part: WeightPart) -> str:
    """Return the name of the weight that a part is of, which stacked ones share a tensor's; without `.weight`."""
    stack, place = _STACK.fullmatch(part.name), _PLACE.match(part.place)
    if stack is None or place is None:
        return part.name.removesuffix(".weight")
    return f"{stack[1]}.{place[1]}.{place[2]}"


def _stack(match: re.Match[str]) -> str:
    return f"{match[1]}.{'down_proj' if match[3] == 'down_proj' else 'gate_up_proj'}"
