"""Packed weights that several processes of a host have in common: one packs them into memory, all others map it.

The memory is a file without a name, so it ends with the last process. In it each part of a checkpoint has a place, in
which it is as in a file of packed weights. Knows no layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdeploy_sd.device.memory import CHUNK_BYTES, HUGE_PAGE_BYTES, make_huge, map_file, punch, whole_huge_pages
from fastdeploy_sd.models.weights.packed_file import MAX_HEADER_BYTES, Key, PackedFile, PackedFileError, write_header
from fastdeploy_sd.types import Bytes

_PLACE_BYTES = 1 << 42
_NUM_PLACES = 1 << 20
_PAGE = 4096
_log = logging.getLogger(__name__)


def create_weights_file() -> int:
    """Return the descriptor of memory for all parts of any checkpoints. What is not written takes none.

    Raises OSError: the system refuses, as with a limit on the sizes of files.
    """
    with contextlib.ExitStack() as stack:
        file = os.memfd_create("fdsd-weights", os.MFD_CLOEXEC)
        stack.callback(os.close, file)
        os.ftruncate(file, _NUM_PLACES * _PLACE_BYTES)
        stack.pop_all()
    return file


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What a process shares packed weights over.

    Attributes:
        path: of memory from `create_weights_file`. Each process opens it anew, so that its locks are its own.
        node: of memory, on which all of the process's processors are; processes of others have another copy.
    """

    path: Path
    node: int


class SharedPart:
    """The packed weights of one part of a checkpoint in the memory of all: another process's, or memory for one's own.

    Waits while another process packs the part. Where nothing is found, others wait until `write` or `close`.

    Attributes:
        found: what another process has written; None = nothing.

    Raises OSError: the memory cannot be used; PackedFileError: it has a part of another key.
    """

    def __init__(self, shared: SharedWeights, name: str, key: Key) -> None:
        digest = hashlib.blake2b(f"{shared.node}\0{name}".encode(), digest_size=8).digest()
        self._place = int.from_bytes(digest, "little") % _NUM_PLACES * _PLACE_BYTES
        self._key, self._begins = key, dict[int, int]()
        # Where the next matrix begins, where pages end that have been given, and what is mapped from `_first` on.
        self._end = self._end_of_pages = self._first = MAX_HEADER_BYTES
        self._window: Bytes = np.zeros(0, np.uint8)
        with contextlib.ExitStack() as stack:
            self._file = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, self._file)
            self._wait_for_turn(name)
            stack.callback(self._lock, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
            self.found = None
            if os.pread(self._file, 1, self._place) != b"\0":
                self.found = PackedFile(shared.path, key, self._place)
            else:  # a process may have ended while it packed
                punch(self._file, self._place, _PLACE_BYTES)
                self._turn = stack.pop_all()

    def close(self) -> None:
        """Let other processes go on; what is mapped stays. May be called twice."""
        if self.found is None:
            self._turn.close()

    def _wait_for_turn(self, name: str) -> None:
        try:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except BlockingIOError:
            _log.info("waiting for the engine that packs the same weights: %s", name)
            self._lock(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK)

    def _lock(self, command: int, kind: int) -> None:
        # What is mapped keeps a lock after its descriptor is closed. l_type, l_whence, l_start, l_len, l_pid:
        fcntl.fcntl(self._file, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, self._place, 1, 0))

    def take(self, num_bytes: int) -> Bytes:
        """Return zeros u8[num_bytes] at a multiple of 4096."""
        begin, end = self._end, self._end + num_bytes
        last = whole_huge_pages(end)
        if last > self._first + len(self._window):
            self._first = begin // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            size = max(last - self._first, CHUNK_BYTES)
            self._window = map_file(self._file, self._place + self._first, size, is_writable=True)
        make_huge(self._window[self._end_of_pages - self._first : last - self._first])
        memory = self._window[begin - self._first : end - self._first]
        self._begins[memory.ctypes.data] = begin
        self._end, self._end_of_pages = -(-end // _PAGE) * _PAGE, last
        return memory

    def write(self, matrices: Mapping[str, Bytes]) -> None:
        """Let other processes find matrices in memory of `take`, and close; raises OSError."""
        begins = [self._begins[data.ctypes.data] for data in matrices.values()]
        write_header(self._file, self._place, self._key, matrices, begins)
        self.close()


@contextlib.contextmanager
def shared_part(shared: SharedWeights | None, name: str, key: Key) -> Iterator[SharedPart | None]:
    """Yield a part; None: nothing is shared, or the log says why it cannot be."""
    part = None
    if shared is not None:
        try:
            part = SharedPart(shared, name, key)
        except (OSError, PackedFileError) as error:  # as of an engine that is started again over another checkpoint
            _log.warning("this engine has weights of its own, as it cannot share those of others: %s", error)
    with contextlib.nullcontext() if part is None else contextlib.closing(part):
        yield part
