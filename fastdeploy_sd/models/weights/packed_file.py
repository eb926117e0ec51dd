"""The file that packed matrices are kept in. Knows names and bytes; knows no checkpoint and no format of weights.

Little-endian: magic, u32 version, u64 size and u64 checksum of the header; the header; the matrices, each at a multiple
of 4096. The header is JSON with the key and, for every matrix, its place and its chunks' checksums, XXH64. A file
appears whole under its name or not at all, and is never changed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.device.memory_nodes import spreading_files
from fastdeploy_sd.process.files import open_regular, replacing
from fastdeploy_sd.types import Bytes

Key = Mapping[str, Any]

MAGIC = b"FDSDPACK"
VERSION = 1
ALIGNMENT = 4096
CHUNK_BYTES = 1 << 20
_START = struct.Struct("<8sIQQ")


class PackedFileError(Exception):
    """The file cannot be used; the text says why."""


class PackedFile:
    """A file of packed matrices, mapped read-only. Every byte is checked when it is opened.

    Raises FileNotFoundError: there is none; PackedFileError: it is damaged, no such file, or has another key.
    """

    def __init__(self, path: Path, key: Key) -> None:
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise PackedFileError(f"expected a readable file: {error}") from error
        # The kernels stream it like memory, where the system can map huge pages of a file.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._data = np.frombuffer(self._map, np.uint8)
        try:
            self._matrices = self._read(json.loads(json.dumps(key)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedFileError(f"expected a header that describes matrices, got another: {error!r}") from error

    @property
    def matrices(self) -> Mapping[str, Bytes]:
        return self._matrices

    def _read(self, key: Key) -> dict[str, Bytes]:
        header = self._read_header()
        if header["key"] != key:
            raise PackedFileError(f"expected the key {json.dumps(key)}, got {json.dumps(header['key'])}")
        return {name: self._verified(name, *place) for name, place in header["matrices"].items()}

    def _read_header(self) -> dict[str, Any]:
        if len(self._data) < _START.size or self._map[: len(MAGIC)] != MAGIC:
            raise PackedFileError("expected a file of packed weights, got another kind")
        _, version, size, checksum = _START.unpack_from(self._map)
        if version != VERSION:
            raise PackedFileError(f"expected version {VERSION}, got {version}")
        text = self._data[_START.size : _START.size + size]
        if len(text) != size or _checksum(text) != checksum:
            raise PackedFileError("expected a header with its checksum, got another; the file is damaged")
        header: dict[str, Any] = json.loads(text.tobytes())
        return header

    def _verified(self, name: str, begin: int, num_bytes: int, checksums: list[int]) -> Bytes:
        data = self._data[begin : begin + num_bytes]
        if len(data) != num_bytes:
            raise PackedFileError(f"{name}: expected bytes up to {begin + num_bytes}, got {len(self._data)} in all")
        if chunk_checksums(data, CHUNK_BYTES).tolist() != checksums:
            raise PackedFileError(f"{name}: expected the checksums of its bytes, got others; the file is damaged")
        return data


def write_packed_file(path: Path, key: Key, matrices: Mapping[str, Bytes], mode: int) -> None:
    """Write a file in place of the old one, if any, with permissions `mode` before the umask; raises OSError.

    Each matrix is read twice: for its checksums, and to be written.
    """
    begins, header = _header(key, matrices)
    # Threads do not touch a file's pages in the parts that they multiply: pages stay where they were written.
    with replacing(path) as file, spreading_files():
        os.fchmod(file.fileno(), mode & ~_umask())
        file.write(_START.pack(MAGIC, VERSION, len(header), _checksum(np.frombuffer(header, np.uint8))) + header)
        for begin, data in zip(begins, matrices.values(), strict=True):
            file.write(bytes(begin - file.tell()))
            file.write(data.data)


def _header(key: Key, matrices: Mapping[str, Bytes]) -> tuple[list[int], bytes]:
    """Return where each matrix begins, and the header, whose own size decides where the first one begins."""
    described = [(data.nbytes, chunk_checksums(data, CHUNK_BYTES).tolist()) for data in matrices.values()]
    first = 0
    while True:
        begins = _begins(first, [num_bytes for num_bytes, _ in described])
        entries = [(begin, *facts) for begin, facts in zip(begins, described, strict=True)]
        document = {"key": key, "matrices": dict(zip(matrices, entries, strict=True))}
        header = json.dumps(document).encode()
        if _START.size + len(header) <= first:
            return begins, header
        first = _aligned(_START.size + len(header))


def _begins(first: int, sizes: Sequence[int]) -> list[int]:
    begins, begin = [], first
    for num_bytes in sizes:
        begins.append(begin)
        begin = _aligned(begin + num_bytes)
    return begins


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _checksum(data: Bytes) -> int:
    return int(chunk_checksums(data, max(data.nbytes, 1))[0]) if data.nbytes else 0


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
