"""Reads one safetensors file by memory mapping. Everything the header says is checked before it is used.

Layout: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
Knows no model and no framework; bfloat16 comes back as u16 bit patterns.
Source: the safetensors format description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import TensorInfo
from fastdeploy_sd.process.files import describe, open_regular

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8
LENGTH_BYTES = 8
SAMPLE_BYTES = 4096
DTYPES: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    # Eight-bit floats are read as bits.
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip


class SafetensorsFile:
    """One open file; `mode` is its type and permissions, as os.stat has them.

    Raises CheckpointError: missing or truncated file, or a header that does not describe it exactly.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: expected a readable safetensors file: {describe(error)}") from error
        self.mode = status.st_mode
        self._status = (status.st_size, status.st_mtime_ns)
        header, self._data_start = self._read_header()
        metadata = header.pop("__metadata__", {})
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self.entries = {name: self._parse_entry(name, value) for name, value in header.items()}
        self._verify_coverage()

    def tensor(self, name: str) -> npt.NDArray[np.generic]:
        """Return one tensor: a read-only view of the file, or a copy where the header misaligns it.

        Raises CheckpointError: no such tensor.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: expected a tensor named {name!r}, found none")
        data = memoryview(self._map)[self._data_start + entry.begin : self._data_start + entry.end]
        array = np.frombuffer(data, np.dtype(DTYPES[entry.dtype]).newbyteorder("<")).reshape(entry.shape)
        return array if array.flags.aligned else array.copy()

    def identity(self) -> dict[str, Any]:
        """Return what identifies the file: size, time of the last write, digests of the header and of samples.

        Two trainings of one base have the same size and header, and the same time where a container image sets it, but
        almost every tensor differs. A change is missed only if it keeps size, time and every sample.
        """
        size, mtime_ns = self._status
        header = hashlib.blake2b(self._map[: self._data_start], digest_size=16).hexdigest()
        return {"size": size, "mtime_ns": mtime_ns, "header": header, "samples": self._sample_digest()}

    def spans(self, num_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield all bytes of the file in order, u8[num_bytes] at a time, a multiple of a page; fewer at the end."""
        data = np.frombuffer(self._map, np.uint8)
        for begin in range(0, len(data), num_bytes):
            yield data[begin : begin + num_bytes]
            self._map.madvise(mmap.MADV_DONTNEED, begin, min(num_bytes, len(data) - begin))

    def is_unchanged(self) -> bool:
        """Whether its path still leads to a file of the size and time that this one was opened with."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == self._status

    def release(self, name: str) -> None:
        """Unmap the pages that lie within one tensor; views stay valid, and touching them maps the file again."""
        entry = self.entries[name]
        begin = -(-(self._data_start + entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self._data_start + entry.end) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _sample_digest(self) -> str:
        """Digest SAMPLE_BYTES from the middle of every tensor, in the file's order; all of a smaller tensor."""
        digest = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].begin):
            size = min(entry.end - entry.begin, SAMPLE_BYTES)
            begin = self._data_start + (entry.begin + entry.end - size) // 2
            digest.update(self._map[begin : begin + size])
            # Reading a page maps its neighbours too, which adds up over thousands of experts.
            self.release(name)
        return digest.hexdigest()

    def _fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a valid safetensors file: {what}")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = len(self._map)
        if size < LENGTH_BYTES:
            raise self._fail(f"expected at least {LENGTH_BYTES} bytes, got {size}")
        (length,) = struct.unpack("<Q", self._map[:LENGTH_BYTES])
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise self._fail(f"the header claims {length} bytes of a file of {size}")
        try:
            header = json.loads(self._map[LENGTH_BYTES : LENGTH_BYTES + length])
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        return header, LENGTH_BYTES + length

    def _parse_entry(self, name: str, value: Any) -> TensorInfo:
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
            raise self._fail(f"tensor {shown(name)}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._fail(f"tensor {shown(name)}: expected a dtype of {', '.join(DTYPES)}, got {shown(dtype)}")
        if not _is_counts(shape) or len(shape) > MAX_RANK:
            raise self._fail(f"tensor {shown(name)}: expected a shape of at most {MAX_RANK} sizes, got {shown(shape)}")
        if not _is_counts(offsets) or len(offsets) != len(("begin", "end")):
            raise self._fail(f"tensor {shown(name)}: expected two data_offsets, got {shown(offsets)}")
        begin, end = offsets
        available = len(self._map) - self._data_start
        # Python integers: a shape whose product overflows 64 bits is compared exactly.
        num_bytes = np.dtype(DTYPES[dtype]).itemsize
        for dim in shape:
            num_bytes *= dim
        if not begin <= end <= available or end - begin != num_bytes:
            raise self._fail(
                f"tensor {shown(name)}: {dtype}{shown(shape)} needs {shown(num_bytes)} bytes,"
                f" got [{shown(begin)}, {shown(end)}) of {available}"
            )
        return TensorInfo(self.path, dtype, tuple(shape), begin, end)

    def _verify_coverage(self) -> None:
        """Raise CheckpointError where tensors share bytes."""
        spans = sorted((e.begin, e.end, name) for name, e in self.entries.items() if e.end > e.begin)
        for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
            if begin < end:
                raise self._fail(f"tensors {shown(first)} and {shown(second)} overlap")


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
