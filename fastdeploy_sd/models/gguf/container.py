"""Reads the container of one GGUF file: metadata and tensors. Everything it says is checked before it is used.

Layout: magic, version, counts; metadata; descriptions of tensors; the tensors' bytes, aligned.
Source: the GGUF description, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.mapped_file import MappedFile
from fastdeploy_sd.models.weights.source import TensorInfo
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_DIMS, _MAX_NAME_BYTES, _MAX_ALIGNMENT = 4, 64, 1 << 16
_MAX_TEXT_BYTES, _MAX_VALUES = 1 << 26, 1 << 24
_NUMBERS: Mapping[int, struct.Struct] = {
    code: struct.Struct("<" + letter)
    for code, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}.items()
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
_PLAIN: Mapping[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# All that have a number; those in neither _PLAIN nor BLOCK_TYPES are refused by name.
_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip


class GgufFile(MappedFile):
    """One open file.

    Attributes:
        metadata: key -> number, text, or a list of them.

    Raises (on construction):
        CheckpointError: missing or truncated file, a header that contradicts it, or a tensor type that is not read.
    """

    kind = "GGUF"

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self._at = 0
        if bytes(self._take(len(_MAGIC))) != _MAGIC:
            raise self.fail("expected it to begin with GGUF")
        version = self._number(_U32)
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise self.fail(f"expected version 2 or 3, got {'a big-endian file' if is_swapped else version}")
        num_tensors, num_values = self._number(_U64), self._number(_U64)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in self.metadata:
                raise self.fail(f"metadata {shown(key)} is there twice")
            self.metadata[key] = self._value(self._number(_U32), f"metadata {shown(key)}")
        self.entries = {}
        for _ in range(num_tensors):
            self._read_entry()
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise self.fail(f"general.alignment: expected 1 to {_MAX_ALIGNMENT}, got {shown(alignment)}")
        self.data_start = -(-self._at // alignment) * alignment
        for name, entry in self.entries.items():
            if entry.begin % alignment or entry.end > len(self.map) - self.data_start:
                raise self.fail(f"tensor {shown(name)}: expected its bytes within the file, aligned to {alignment}")
        self.verify_no_overlap()

    def read(self, entry: TensorInfo) -> npt.NDArray[np.generic]:
        """Return a tensor, read-only: numbers, or u8[rows, bytes of a row] of a block type."""
        dtype = _PLAIN.get(entry.dtype)
        if dtype is not None:
            return np.frombuffer(self.view(entry), np.dtype(dtype).newbyteorder("<")).reshape(entry.shape)
        num_rows = math.prod(entry.shape[:-1])
        return np.frombuffer(self.view(entry), np.uint8).reshape(num_rows, -1)

    def _take(self, num_bytes: int) -> memoryview:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > len(self.map):
            raise self.fail(f"expected {shown(num_bytes)} more bytes at {begin}, got {len(self.map) - begin}")
        return memoryview(self.map)[begin : self._at]

    def _number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self._take(kind.size))[0]

    def _string(self) -> str:
        length = self._number(_U64)
        if length > _MAX_TEXT_BYTES:
            raise self.fail(f"expected a text of at most {_MAX_TEXT_BYTES} bytes, got {length}")
        data = bytes(self._take(length))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.fail(f"expected UTF-8 text, got {data[:40]!r}") from None

    def _value(self, code: int, where: str) -> Any:
        if code == _STRING:
            return self._string()
        if code == _BOOL:
            return bool(self._take(1)[0])
        if code == _ARRAY:
            return self._array(where)
        if code not in _NUMBERS:
            raise self.fail(f"{where}: expected a type of 0 to 12, got {code}")
        return self._number(_NUMBERS[code])

    def _array(self, where: str) -> list[Any]:
        code, count = self._number(_U32), self._number(_U64)
        if code == _ARRAY:
            raise self.fail(f"{where}: expected no arrays in an array")
        if count > _MAX_VALUES:
            raise self.fail(f"{where}: expected at most {_MAX_VALUES} values, got {count}")
        if code in _NUMBERS or code == _BOOL:
            kind = _NUMBERS.get(code, struct.Struct("<?"))
            return [value for (value,) in kind.iter_unpack(self._take(count * kind.size))]
        return [self._value(code, where) for _ in range(count)]

    def _read_entry(self) -> None:
        name = self._string()
        num_dims = self._number(_U32)
        if len(name.encode()) > _MAX_NAME_BYTES or name in self.entries or not 1 <= num_dims <= _MAX_DIMS:
            expected = f"a new name of at most {_MAX_NAME_BYTES} bytes and 1 to {_MAX_DIMS} dimensions"
            raise self.fail(f"tensor {shown(name)}: expected {expected}, got {num_dims} dimensions")
        shape = tuple(self._number(_U64) for _ in range(num_dims))[::-1]
        code, begin = self._number(_U32), self._number(_U64)
        dtype = _TYPES.get(code, str(code))
        if dtype in BLOCK_TYPES:
            block = BLOCK_TYPES[dtype]
            size, num_bytes = block.size, block.num_bytes
        elif dtype in _PLAIN:
            size, num_bytes = 1, np.dtype(_PLAIN[dtype]).itemsize
        else:
            expected = ", ".join([*_PLAIN, *BLOCK_TYPES])
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected a type of {expected}, got {dtype}")
        if shape[-1] % size:
            raise self.fail(f"tensor {shown(name)}: {dtype} needs rows of a multiple of {size}, got {shape[-1]}")
        end = begin + math.prod(shape) // size * num_bytes
        self.entries[name] = TensorInfo(self.path, dtype, shape, begin, end)
