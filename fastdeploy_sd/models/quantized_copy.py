"""Writes a checkpoint whose linear layers hold the integers that `--quantization` would make of them.

Its layout is pack-quantized of compressed-tensors. Groups are as small as the cuts of sums need: their scales repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weight_bytes import matrices
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.source import FLOATS, ModelSource
from fastdeploy_sd.models.weights.storages.registry import read_weight
from fastdeploy_sd.models.weights.storages.stacked_experts import weight_name
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import FACTOR_INPUTS, GROUP, pack_linear, unpack_codes
from fastdeploy_sd.ops.weight_matrix import WeightMatrix, WeightPart
from fastdeploy_sd.process.safetensors_writer import ITEM_BYTES, num_bytes_of
from fastdeploy_sd.types import I32, U8
from fastdeploy_sd.types.ranges import SliceRule

_BITS: Mapping[LinearFormat, int] = {"wint4": 4, "wint8": 8}
_WORD_BITS = 32
_DTYPES = {"uint16": "BF16", "float16": "F16", "float32": "F32"}
_MATRIX = 2


class QuantizedCopy:
    """The tensors and the config.json of such a checkpoint.

    Raises CheckpointError: a tensor is missing, has another shape, or would not be used.
    """

    def __init__(self, source: ModelSource, config: DecoderConfig, scheme: QuantScheme) -> None:
        weights = DecoderWeights(source, config)
        weights.verify()
        self._source, self._config = source, source.config
        self._parts: dict[str, tuple[WeightPart, LinearFormat, SliceRule]] = {}
        read = set[str]()
        for matrix, fmt, slices in matrices(weights, config, scheme):
            for found in matrix.parts if fmt in _BITS else ():
                part = _whole(source, found)
                is_tied = config.tie_word_embeddings and part.tensors == weights.embedding().tensors
                self._parts["lm_head" if is_tied else weight_name(part)] = part, fmt, slices
                read.update(() if is_tied else part.tensors)
        self._plain = [name for name in source.names() if name not in read and _is_number(source, name)]

    @property
    def num_bytes(self) -> int:
        """What the tensors take."""
        return num_bytes_of(self.entries())

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        groups: dict[tuple[int, int], list[str]] = {}
        for name, (part, fmt, slices) in self._parts.items():
            groups.setdefault((_BITS[fmt], group_size(part, fmt, slices)), []).append(name)
        described = {
            f"group_{i}": {"targets": names, "weights": _weights_of(bits, size), "format": "pack-quantized"}
            for i, ((bits, size), names) in enumerate(groups.items())
        }
        ignored = [] if "lm_head" in self._parts else ["lm_head"]
        return {key: value for key, value in self._config.items() if key != "quantization_config"} | {
            "tie_word_embeddings": bool(self._config.get("tie_word_embeddings")) and "lm_head" not in self._parts,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": described,
                "ignore": ignored,
            },
        }

    def entries(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the type and the shape of every tensor, the widest elements first."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {f"{name}.weight_shape": ("I64", (2,)) for name in self._parts}
        for name, (part, fmt, slices) in self._parts.items():
            num_rows, num_columns = part.shape
            shapes[f"{name}.weight_packed"] = "I32", (num_rows, -(-num_columns * _BITS[fmt] // _WORD_BITS))
            num_groups = num_columns // group_size(part, fmt, slices)
            shapes[f"{name}.weight_scale"] = "F32", (num_rows, num_groups)
            if fmt == "wint4":
                shapes[f"{name}.weight_zero_point"] = "I32", (-(-num_rows * _BITS[fmt] // _WORD_BITS), num_groups)
        plain = {name: (_DTYPES[str(self._number(name).dtype)], self._number(name).shape) for name in self._plain}
        return shapes | dict(sorted(plain.items(), key=lambda item: -ITEM_BYTES[item[1][0]]))

    def tensors(self) -> Iterator[npt.NDArray[Any]]:
        """Yield them in the order of the entries."""
        entries = self.entries()
        for part, _, _ in self._parts.values():
            yield np.array(part.shape, np.int64)
        for part, fmt, slices in self._parts.values():
            yield from _quantised(part, fmt, slices)
            self._source.release(part.tensors)
        for name in entries:
            if name in self._plain:
                yield self._number(name)

    def _number(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor that stays as it is, matrices [out, in]; stored integers as the bfloat16 that layers read."""
        shape = self._source.shape(name)
        if self._source.tensors[name].dtype in FLOATS:
            data = self._source.tensor(name, shape)
            return np.ascontiguousarray(data.T) if data.ndim == _MATRIX and self._source.is_transposed(name) else data
        return to_bf16(read_weight(self._source, name.removesuffix(".weight"), (shape[0], shape[1])).numbers().data)


def _whole(source: ModelSource, part: WeightPart) -> WeightPart:
    """Return the weight that some outputs of are a part; every output is quantised by itself."""
    shape = source.shape(part.name) if part.place and part.name in source else ()
    if len(shape) != _MATRIX or shape[1] != part.shape[1]:
        return part
    return read_weight(source, part.name.removesuffix(".weight"), (shape[0], shape[1]))


def group_size(part: WeightPart, fmt: LinearFormat, slices: SliceRule) -> int:
    """Return the inputs that share a scale: as many as lie between two borders of the kernels' groups."""
    num_columns, most = part.shape[1], FACTOR_INPUTS if fmt == "wint4" else GROUP
    return math.gcd(most, num_columns, *(piece.start for piece in slices.ranges(num_columns)))


def _is_number(source: ModelSource, name: str) -> bool:
    return source.tensors[name].dtype in FLOATS or name.endswith(".weight")


def _weights_of(bits: int, size: int) -> dict[str, Any]:
    is_symmetric = bits != _BITS["wint4"]
    return {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": "group", "group_size": size}


def _quantised(part: WeightPart, fmt: LinearFormat, slices: SliceRule) -> Iterator[npt.NDArray[Any]]:
    """Yield the words i32[N, K * bits / 32] of a part's integers from 0 on, and their scales f32[N, K / group].

    Then those of zeros i32[N * bits / 32, K / group] of a format that has any.
    """
    codes, scales, zeros = unpack_codes(pack_linear(WeightMatrix((part.numbers(),)), fmt, slices))
    if not np.isfinite(scales).all():
        raise CheckpointError(f"tensor {part.name!r}: expected finite numbers, got others")
    size = group_size(part, fmt, slices)
    yield _words(codes, _BITS[fmt])
    yield np.ascontiguousarray(scales[:, ::size])
    if fmt == "wint4":
        yield np.ascontiguousarray(_words(zeros[:, ::size].T, _BITS[fmt]).T)


def _words(integers: U8, bits: int) -> I32:
    """Return i32[n, m * bits / 32] of integers [n, m], from the lowest bits on."""
    (num_rows, num_columns), per_word = integers.shape, _WORD_BITS // bits
    padded = np.zeros((num_rows, -(-num_columns // per_word), per_word), np.uint32)
    padded.reshape(num_rows, -1)[:, :num_columns] = integers
    places = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words: I32 = np.bitwise_or.reduce(padded << places, axis=2).view(np.int32)
    return words
