"""The file that packed matrices are kept in. Knows names and bytes; knows no checkpoint and no format of weights.

Little-endian: magic, u32 version, u64 size and u64 checksum of the header; the header; the matrices, each at a multiple
of 4096. The header is JSON with the key and, for every matrix, its place and its chunks' checksums, XXH64. A file
appears whole under its name or not at all, and is never changed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.device.memory import map_file, whole_huge_pages
from fastdeploy_sd.device.memory_nodes import spreading_files
from fastdeploy_sd.process.files import open_regular, replacing
from fastdeploy_sd.types import Bytes

Key = Mapping[str, Any]

MAGIC = b"FDSDPACK"
VERSION = 1
ALIGNMENT = 4096
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 26
_START = struct.Struct("<8sIQQ")


class PackedFileError(Exception):
    """The file cannot be used; the text says why."""


class PackedFile:
    """A file of packed matrices, mapped read-only. Every byte is checked when it is opened.

    `begin`: where it begins in what is at `path`, a multiple of 4096; it ends anywhere.

    Raises FileNotFoundError: there is none; PackedFileError: it is damaged, no such file, or has another key.
    """

    def __init__(self, path: Path, key: Key, begin: int = 0) -> None:
        try:
            with open_regular(path) as file:
                self._matrices = _read(file.fileno(), begin, json.loads(json.dumps(key)))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise PackedFileError(f"expected a readable file: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedFileError(f"expected a header that describes matrices, got another: {error!r}") from error

    @property
    def matrices(self) -> Mapping[str, Bytes]:
        return self._matrices


def _read(file: int, begin: int, key: Key) -> dict[str, Bytes]:
    header = _read_header(file, begin)
    if header["key"] != key:
        raise PackedFileError(f"expected the key {json.dumps(key)}, got {json.dumps(header['key'])}")
    places = header["matrices"]
    if not places:
        return {}
    end = max(place + num_bytes for place, num_bytes, _ in places.values())
    data = map_file(file, begin, min(whole_huge_pages(end), os.fstat(file).st_size - begin))
    return {name: _verified(data, name, *place) for name, place in places.items()}


def _read_header(file: int, begin: int) -> dict[str, Any]:
    start = os.pread(file, _START.size, begin)
    if len(start) < _START.size or not start.startswith(MAGIC):
        raise PackedFileError("expected a file of packed weights, got another kind")
    _, version, size, checksum = _START.unpack(start)
    if version != VERSION:
        raise PackedFileError(f"expected version {VERSION}, got {version}")
    text = np.frombuffer(os.pread(file, min(size, MAX_HEADER_BYTES), begin + _START.size), np.uint8)
    if len(text) != size or _checksum(text) != checksum:
        raise PackedFileError("expected a header with its checksum, got another; the file is damaged")
    header: dict[str, Any] = json.loads(text.tobytes())
    return header


def _verified(data: Bytes, name: str, begin: int, num_bytes: int, checksums: list[int]) -> Bytes:
    found = data[begin : begin + num_bytes]
    if len(found) != num_bytes:
        raise PackedFileError(f"{name}: expected bytes up to {begin + num_bytes}, got {len(data)} in all")
    if chunk_checksums(found, CHUNK_BYTES).tolist() != checksums:
        raise PackedFileError(f"{name}: expected the checksums of its bytes, got others; the file is damaged")
    return found


def write_packed_file(path: Path, key: Key, matrices: Mapping[str, Bytes], mode: int) -> None:
    """Write a file in place of the old one, if any, with permissions `mode` before the umask; raises OSError.

    Each matrix is read twice: for its checksums, and to be written.
    """
    begins, header = _header(key, matrices)
    # Threads do not touch a file's pages in the parts that they multiply: pages stay where they were written.
    with replacing(path) as file, spreading_files():
        os.fchmod(file.fileno(), mode & ~_umask())
        file.write(header)
        for begin, data in zip(begins, matrices.values(), strict=True):
            file.write(bytes(begin - file.tell()))
            file.write(data.data)


def write_header(file: int, begin: int, key: Key, matrices: Mapping[str, Bytes], begins: Sequence[int]) -> None:
    """Make a file of matrices that are in their places, counted from `begin`; raises OSError.

    Who reads at the same time finds no file, or a whole one. The first MAX_HEADER_BYTES are the header's.
    """
    header = _encoded(key, _described(matrices), begins)
    os.pwrite(file, header[_START.size :], begin + _START.size)
    os.pwrite(file, header[: _START.size], begin)


def _header(key: Key, matrices: Mapping[str, Bytes]) -> tuple[list[int], bytes]:
    """Return where each matrix begins, and what comes before them, whose size decides where the first begins."""
    described, first = _described(matrices), 0
    while True:
        begins = _begins(first, [num_bytes for num_bytes, _ in described.values()])
        header = _encoded(key, described, begins)
        if len(header) <= first:
            return begins, header
        first = _aligned(len(header))


def _described(matrices: Mapping[str, Bytes]) -> dict[str, tuple[int, list[int]]]:
    return {name: (data.nbytes, chunk_checksums(data, CHUNK_BYTES).tolist()) for name, data in matrices.items()}


def _encoded(key: Key, described: Mapping[str, tuple[int, list[int]]], begins: Sequence[int]) -> bytes:
    places = {name: (begin, *facts) for begin, (name, facts) in zip(begins, described.items(), strict=True)}
    header = json.dumps({"key": key, "matrices": places}).encode()
    return _START.pack(MAGIC, VERSION, len(header), _checksum(np.frombuffer(header, np.uint8))) + header


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
