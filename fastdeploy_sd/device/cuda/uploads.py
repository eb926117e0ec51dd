"""What a model's weights go up to a GPU through: two bounded pieces of pinned memory in turn, and as much of the GPU's.

While one piece is copied, the other is filled; who fills waits only where the copies out of the piece before the last
have not been made. So loading takes the host no more than the two pieces, whatever the model's size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fastdeploy_sd.device import library as kernels
from fastdeploy_sd.device.arrays import Array, address
from fastdeploy_sd.device.cuda.handles import new_stream
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import ALIGNMENT, CudaMemory, StagingMemory, pinned_zeros
from fastdeploy_sd.types import Bytes

PIECE_BYTES = 64 << 20
# What one thread copies at a time: fewer bytes are copied sooner than a thread is woken.
_SHARE_BYTES = 4 << 20


class CudaUploads:
    """Large things on their way to a GPU, in order with all that runs on its stream; small models take small pieces."""

    def __init__(self, library: CudaLibrary, memory: CudaMemory, stream: int, num_bytes: int) -> None:
        self._library, self._memory, self._stream = library, memory, stream
        self.piece_bytes = max(min(PIECE_BYTES, -(-num_bytes // ALIGNMENT) * ALIGNMENT), ALIGNMENT)
        self._pieces: list[StagingMemory | None] = [None, None]
        self._turn, self._used = 0, 0
        self._threads = ThreadPoolExecutor(kernels.num_threads(), thread_name_prefix="uploads")

    def take(self, num_bytes: int) -> tuple[Bytes, int]:
        """Return u8[num_bytes] of pinned memory, and the address of as much of the GPU's memory.

        Both are the caller's until it asks again; what it puts on the stream before that may read and write them.
        Raises MemoryError: more than `piece_bytes` is asked for, and there is not that much.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        piece = self._pieces[self._turn]
        if piece is None or self._used + size > len(piece.host):
            piece = self._next(size)
        begin, self._used = self._used, self._used + size
        return piece.host[begin : begin + num_bytes], piece.address + begin

    def fill(self, to: Array, source: Array) -> None:
        """Copy an array of the same shape, by several threads where there is much of it."""
        count = min(len(source), -(-source.nbytes // _SHARE_BYTES))
        if count < 2:  # noqa: PLR2004
            to[...] = source
            return
        bounds = [len(source) * i // count for i in range(count + 1)]
        list(self._threads.map(lambda i: _copy(to, source, bounds[i], bounds[i + 1]), range(count)))

    def copy(self, to: int, host: Bytes) -> None:
        """Copy what `take` gave to an address of the GPU."""
        self._library.call("start_copy", to, address(host), ctypes.c_int64(host.nbytes), self._stream)

    def send(self, to: int, num_rows: int, row_bytes: int, write: Callable[[slice, Bytes], object]) -> None:
        """Send rows to an address. `write` writes the bytes of some neighbouring rows, u8[n * row_bytes], at a time."""
        at_once = max(self.piece_bytes // max(row_bytes, 1), 1)
        for begin in range(0, num_rows, at_once):
            rows = slice(begin, min(begin + at_once, num_rows))
            host, _ = self.take((rows.stop - begin) * row_bytes)
            write(rows, host)
            self.copy(to + begin * row_bytes, host)

    def close(self) -> None:
        """Wait for all that was sent, and give the pieces back."""
        try:
            self._library.call("stream_synchronize", self._stream)
        finally:
            self._threads.shutdown()
            self._pieces = [None, None]

    def _next(self, size: int) -> StagingMemory:
        """Turn to the other piece, which holds `size` bytes and is not read any more."""
        if (full := self._pieces[self._turn]) is not None:
            self._library.call("event_record", full.event.address, self._stream)
            self._turn = 1 - self._turn
        piece, self._used = self._pieces[self._turn], 0
        if piece is not None:
            self._library.call("event_synchronize", piece.event.address)
        if piece is None or len(piece.host) < size:
            self._pieces[self._turn] = piece = None
            piece = self._pieces[self._turn] = StagingMemory(self._library, self._memory, max(size, self.piece_bytes))
        return piece


class CudaOverwriter:
    """What goes up to memory of a GPU that nothing reads, while passes run: on a stream that waits for none of them.

    Raises MemoryError: the system gives no `num_bytes` of pinned memory.
    """

    def __init__(self, library: CudaLibrary, num_bytes: int) -> None:
        self._library, self._gpu = library, ctypes.c_int32(library.current_device())
        self._host, self._stream = pinned_zeros(library, num_bytes), new_stream(library)

    @property
    def num_bytes(self) -> int:
        """The most at a time."""
        return self._host.nbytes

    def write(self, to: int, num_bytes: int, write: Callable[[Bytes], object]) -> None:
        """See Device.overwrite."""
        host = self._host[:num_bytes]
        write(host)
        self._library.call("use_device", self._gpu)  # of the calling thread
        self._library.call("start_copy", to, address(host), ctypes.c_int64(num_bytes), self._stream.address)
        self._library.call("stream_synchronize", self._stream.address)


def _copy(to: Array, source: Array, begin: int, end: int) -> None:
    to[begin:end] = source[begin:end]
