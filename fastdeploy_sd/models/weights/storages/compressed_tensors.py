"""Integer weights as the library compressed-tensors stores them; its FP8 is read as other FP8 is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import ONE_NUMBER, Weights, WeightSource
from fastdeploy_sd.models.weights.storages.integers import Groups, IntegerPart, group_indices
from fastdeploy_sd.models.weights.storages.packed_integers import PackedIntegers, bits_of_words, in_order

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_INT8_ZERO = 128


class CompressedTensors:
    """The Storage: words [N, K / n] or int8 [N, K] of integers, scales [N, G], [N, 1] or one, and zero points."""

    name = "compressed-tensors, with a scale per group, output or tensor"

    def described(self, where: str, description: Mapping[str, Any]) -> CompressedTensors | None:
        if description.get("quant_method") != "compressed-tensors" or description.get("format") == "dense":
            return None
        for key, stored in _formats(description):
            if stored not in _FORMATS:
                raise CheckpointError(f"{where}: {key}: expected one of {', '.join(_FORMATS)}, got {shown(stored)}")
        transforms = description.get("transform_config")
        if transforms:
            raise CheckpointError(f"{where}: transform_config: expected none, got {shown(transforms)}")
        return self

    def holds(self, source: WeightSource, weight: str) -> bool:
        name = f"{weight}.weight"
        return f"{name}_packed" in source or (name in source and source.tensors[name].dtype == "I8")

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> IntegerPart:
        packed, name = f"{weight}.weight_packed", f"{weight}.weight"
        if packed in source:
            bits = bits_of_words(source, packed, 1, shape[1])
            order = in_order(bits)
            words = source.tensor(packed, (shape[0], -(-shape[1] // len(order))), ("I32",))
            name = packed
        else:
            bits, order, words = 8, (0,), source.tensor(name, shape, ("I8",))
        integers = PackedIntegers(words, bits, 1, order, 0, shape[1])
        scales = _scales(source, f"{weight}.weight_scale", shape[0])
        zero_name, index_name = f"{weight}.weight_zero_point", f"{weight}.weight_g_idx"
        groups = _with_zeros(source, zero_name, scales, bits)
        # -1: groups of neighbours.
        has_order = index_name in source and source.tensor(index_name, (shape[1],), ("I32",)).max(initial=-1) >= 0
        group_of = group_indices(source, index_name, shape[1], scales.shape[1]) if has_order else None
        return IntegerPart.create(weight, integers, groups, group_of, [name, f"{weight}.weight_scale"])


def _formats(description: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key that names a format, and its value."""
    yield "format", description.get("format")
    groups = description.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and group.get("format") is not None:
            yield f"config_groups.{shown(name)[1:-1]}.format", group["format"]
    sparsity = description.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity:
        yield "sparsity_config.format", sparsity.get("format", "dense")


def _scales(source: WeightSource, name: str, num_rows: int) -> Weights:
    """Return [N, G], of one group where there is a scale per output or one."""
    shape = source.shape(name) if name in source else ()
    if shape in ONE_NUMBER:
        return np.broadcast_to(source.tensor(name, shape).reshape(1, 1), (num_rows, 1))
    if shape == (num_rows,):
        return source.tensor(name, shape)[:, None]
    return source.tensor(name, (num_rows, shape[-1]))


def _with_zeros(source: WeightSource, name: str, scales: Weights, bits: int) -> Groups:
    """Return groups with the zero points that there are: words, packed along the outputs, or int8 around 0."""
    middle, (num_rows, num_groups) = 1 << (bits - 1), scales.shape
    if name not in source:
        return Groups(scales, None, middle)
    if source.tensors[name].dtype == "I8":
        zeros = np.broadcast_to(_int8_zeros(source, name, scales), scales.shape)
        return Groups(scales, PackedIntegers(zeros, 8, 0, (0,), 0, num_rows), middle - _INT8_ZERO)
    order = in_order(bits)
    words = source.tensor(name, (-(-num_rows // len(order)), num_groups), ("I32",))
    return Groups(scales, PackedIntegers(words, bits, 0, order, 0, num_rows), 0)


def _int8_zeros(source: WeightSource, name: str, scales: Weights) -> Weights:
    shape = source.shape(name)
    is_one = shape in ONE_NUMBER
    return source.tensor(name, shape if is_one else scales.shape, ("I8",)).reshape((1, 1) if is_one else scales.shape)
