"""The slots for copies of KV blocks: memory of this process, or a file that outlives it. Knows no threads.

    header  4096 bytes: magic, u32 version, u64 slot bytes, a digest of the key, and the checksum of these
    slot i  at 4096 + i * stride: a record, then the block's bytes
    record  content's hash and parent, u64 serial number, u64 checksum of the bytes, tokens, checksum of the record

Little-endian; checksums are XXH64. A slot is valid only if both checksums are right, so a power failure may interrupt
writes in any order. The number of slots is not stored: it may differ between starts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import Bytes

MAGIC = b"FDSDSWAP"
VERSION = 1
_OPTION = "swap_folder"
_PAGE_BYTES = 4096
_DIGEST_BYTES = 32
_HEADER = struct.Struct(f"<8sIQ{_DIGEST_BYTES}s")
_HASH_BYTES = 16
_RECORD = struct.Struct(f"<{_HASH_BYTES}s{_HASH_BYTES}sQQ")
_CHECKSUM = struct.Struct("<Q")
_log = logging.getLogger(__name__)


class DamagedSlotError(Exception):
    """A slot does not hold the wanted content; the text says why."""


def slot_stride(block_bytes: int, block_size: int) -> int:
    """Return the bytes that a slot takes: a record with `block_size` tokens and a block, in whole pages."""
    needed = _RECORD.size + 4 * block_size + _CHECKSUM.size + block_bytes
    return -(-needed // _PAGE_BYTES) * _PAGE_BYTES


class SwapFile:
    """Slots of one size. Only one thread at a time may read or write them.

    Without a path they are in memory of this process, which the system provides at the first write and frees at
    `close`. With one they are in a file of mode 0600, as KV and tokens reveal what users wrote; slots that fit the key
    are kept. The file is locked against other processes.

    Args:
        path: of the file, None = memory.
        key: of JSON values: everything but its tokens that decides the bytes of a block's KV.

    Raises (on construction):
        ConfigError: the file cannot be opened or locked, is another kind of file, or has no room on its disk.
    """

    def __init__(
        self, path: Path | None, key: Mapping[str, Any], num_slots: int, block_bytes: int, block_size: int
    ) -> None:
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self._path, self._block_size = path, block_size
        self._stride = slot_stride(block_bytes, block_size)
        self._record_bytes = _RECORD.size + 4 * block_size + _CHECKSUM.size
        self._serial = 0
        self._kept: list[tuple[int, int, CachedBlock]] = []
        if path is None:
            self._fd = os.memfd_create("fastdeploy_sd swap", os.MFD_CLOEXEC)
            return
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).digest()
        self._fd = _open(path)
        try:
            self._begin(path, _HEADER.pack(MAGIC, VERSION, self._stride, digest))
        except BaseException:
            os.close(self._fd)
            raise

    def kept(self) -> list[tuple[int, CachedBlock]]:
        """Return the slots kept from an earlier start, the earliest written first; their bytes are not verified."""
        return [(slot, content) for _, slot, content in sorted(self._kept, key=lambda kept: kept[0])]

    def write(self, slot: int, content: CachedBlock, data: Bytes) -> None:
        """Put a block's bytes u8[block_bytes] into a slot.

        Raises OSError: the system refuses; the slot then holds nothing.
        """
        self.erase(slot)
        self._serial += 1
        record = _RECORD.pack(content.hash, content.parent, self._serial, _checksum(data)) + content.tokens
        record += _CHECKSUM.pack(_checksum(np.frombuffer(record, np.uint8)))
        self._write_all(data, self._position(slot) + self._record_bytes)
        self._write_all(np.frombuffer(record, np.uint8), self._position(slot))

    def erase(self, slot: int) -> None:
        """Empty a slot; raises as `write`."""
        self._write_all(np.zeros(self._record_bytes, np.uint8), self._position(slot))

    def read(self, slot: int, content: CachedBlock, data: Bytes) -> None:
        """Read a slot's bytes into u8[block_bytes]; their content is undefined if this raises.

        Raises DamagedSlotError: it does not hold this content; OSError: the system refuses.
        """
        record = np.empty(self._record_bytes, np.uint8)
        found = self._parse(record) if self._read_all(record, self._position(slot)) else None
        if found is None or found[2] != content:
            raise DamagedSlotError(f"swap slot {slot}: expected a record of the block, got another")
        if not self._read_all(data, self._position(slot) + self._record_bytes) or _checksum(data) != found[1]:
            raise DamagedSlotError(f"swap slot {slot}: expected the checksum of its bytes, got another")

    def close(self) -> None:
        """Free the memory, or close the file. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _begin(self, path: Path, fields: bytes) -> None:
        status = os.fstat(self._fd)
        size = _PAGE_BYTES + self.num_slots * self._stride
        header = fields + _CHECKSUM.pack(_checksum(np.frombuffer(fields, np.uint8)))
        found = os.pread(self._fd, len(header), 0)
        if found.strip(b"\0") and not found.startswith(MAGIC):
            _fail(path, "expected a file of KV slots, got another kind")
        disk = os.fstatvfs(self._fd)
        missing = size - status.st_blocks * 512 - disk.f_bavail * disk.f_frsize
        if missing > 0:
            _fail(path, f"expected room for {size} bytes on its disk, got {missing} too few")
        if found == header:
            os.ftruncate(self._fd, min(status.st_size, size))
            self._kept = list(self._scan())
            self._serial = max((serial for serial, _, _ in self._kept), default=0)
        else:
            if found.strip(b"\0"):
                _log.info("%s: %s: KV of another model, format or version: beginning anew", _OPTION, path)
            os.ftruncate(self._fd, 0)
            self._write_all(np.frombuffer(header, np.uint8), 0)

    def _scan(self) -> Iterator[tuple[int, int, CachedBlock]]:
        record = np.empty(self._record_bytes, np.uint8)
        for slot in range(self.num_slots):
            if not self._read_all(record, self._position(slot)):
                return  # the end of the file
            found = self._parse(record)
            if found is not None:
                yield found[0], slot, found[2]

    def _parse(self, record: Bytes) -> tuple[int, int, CachedBlock] | None:
        """Return serial number, checksum of the bytes, and content; None = empty or damaged."""
        end = self._record_bytes - _CHECKSUM.size
        if _CHECKSUM.pack(_checksum(record[:end])) != record[end:].tobytes():
            return None
        block_hash, parent, serial, checksum = _RECORD.unpack_from(record.data)
        return serial, checksum, CachedBlock(block_hash, parent, record[_RECORD.size : end].tobytes())

    def _position(self, slot: int) -> int:
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"
        return _PAGE_BYTES + slot * self._stride

    def _write_all(self, data: Bytes, position: int) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._fd, data[done:].data, position + done)

    def _read_all(self, data: Bytes, position: int) -> bool:
        """Fill an array; False where the file is too short."""
        done = 0
        while done < data.nbytes:
            count = os.preadv(self._fd, [data[done:].data], position + done)
            if count == 0:
                return False
            done += count
        return True


def _open(path: Path) -> int:
    """Open and lock a file, making it and its folder if they are missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        _fail(path, f"expected a folder in which a file can be written: {error.strerror}")
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            _fail(path, "expected a regular file, got another kind")
        os.fchmod(fd, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            _fail(path, "expected a file that no other server uses, got one that is locked")
        _fail(path, f"expected a file that can be locked: {error.strerror}")
    except ConfigError:
        os.close(fd)
        raise
    return fd


def _checksum(data: Bytes) -> int:
    return int(chunk_checksums(data, data.nbytes)[0])  # one chunk: the kernel threads are left alone


def _fail(path: Path, what: str) -> NoReturn:
    raise ConfigError(f"{_OPTION}: {path}: {what}", param=_OPTION)
