"""Reads one safetensors file by memory mapping. Everything the header says is checked before it is used.

Layout: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
Knows no model and no framework; bfloat16 comes back as u16 bit patterns.
Source: the safetensors format description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.mapped_file import MappedFile
from fastdeploy_sd.models.weights.source import TensorInfo
from fastdeploy_sd.process.safetensors_writer import DTYPES

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8
LENGTH_BYTES = 8


class SafetensorsFile(MappedFile):
    """One open file.

    Attributes:
        metadata: its `__metadata__` map.

    Raises (on construction):
        CheckpointError: missing or truncated file, or a header that does not describe it exactly.
    """

    kind = "safetensors"

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        header, self.data_start = self._read_header()
        metadata = header.pop("__metadata__", {})
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self.entries = {name: self._parse_entry(name, value) for name, value in header.items()}
        self.verify_no_overlap()

    def tensor(self, name: str) -> npt.NDArray[np.generic]:
        """Return one tensor: a read-only view of the file, or a copy where the header misaligns it.

        Raises CheckpointError: no such tensor.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: expected a tensor named {name!r}, found none")
        return self.read(entry)

    def read(self, entry: TensorInfo) -> npt.NDArray[np.generic]:
        array = np.frombuffer(self.view(entry), np.dtype(DTYPES[entry.dtype]).newbyteorder("<")).reshape(entry.shape)
        return array if array.flags.aligned else array.copy()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = len(self.map)
        if size < LENGTH_BYTES:
            raise self.fail(f"expected at least {LENGTH_BYTES} bytes, got {size}")
        (length,) = struct.unpack("<Q", self.map[:LENGTH_BYTES])
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise self.fail(f"the header claims {length} bytes of a file of {size}")
        try:
            header = json.loads(self.map[LENGTH_BYTES : LENGTH_BYTES + length])
        except (ValueError, RecursionError) as error:
            raise self.fail(f"the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self.fail("the header is not a JSON object")
        return header, LENGTH_BYTES + length

    def _parse_entry(self, name: str, value: Any) -> TensorInfo:
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
            raise self.fail(f"tensor {shown(name)}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.fail(f"tensor {shown(name)}: expected a dtype of {', '.join(DTYPES)}, got {shown(dtype)}")
        if not _is_counts(shape) or len(shape) > MAX_RANK:
            raise self.fail(f"tensor {shown(name)}: expected a shape of at most {MAX_RANK} sizes, got {shown(shape)}")
        if not _is_counts(offsets) or len(offsets) != len(("begin", "end")):
            raise self.fail(f"tensor {shown(name)}: expected two data_offsets, got {shown(offsets)}")
        begin, end = offsets
        available = len(self.map) - self.data_start
        # Python integers: a shape whose product overflows 64 bits is compared exactly.
        num_bytes = np.dtype(DTYPES[dtype]).itemsize
        for dim in shape:
            num_bytes *= dim
        if not begin <= end <= available or end - begin != num_bytes:
            raise self.fail(
                f"tensor {shown(name)}: {dtype}{shown(shape)} needs {shown(num_bytes)} bytes,"
                f" got [{shown(begin)}, {shown(end)}) of {available}"
            )
        return TensorInfo(self.path, dtype, tuple(shape), begin, end)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
