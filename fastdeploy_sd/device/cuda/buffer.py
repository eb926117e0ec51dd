"""Buffers of host and GPU: changed rows are uploaded in one copy, and what kernels wrote is copied back.

An upload gathers all changed pieces in pinned memory, copies them, and one kernel scatters them to their places. The
host goes on meanwhile and may write the arrays again, as the pinned memory holds their content. Several pinned
buffers are used in turn, so the host waits only for a copy of some steps ago. Their size is fixed, so that no step
needs more memory than the server had at its start; a larger upload takes several copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import Array, address
from fastdeploy_sd.device.buffer import Fetcher, HostDeviceBuffer, offset_in
from fastdeploy_sd.device.cuda.handles import CudaEvent
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import CudaMemory, StagingMemory, pinned_zeros
from fastdeploy_sd.device.device_tensor import DeviceTensor, element_of
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.types import Bytes

_WORD = 4
# More than a step of some thousand tokens has.
STAGING_BYTES = 1 << 20
# For two steps; each uploads its plan and then the sizes of its drafting.
NUM_STAGING = 4


class CudaBuffer(HostDeviceBuffer):
    """A buffer of a GPU.

    Raises ValueError: the array is not contiguous, has no whole number of 4-byte words, or elements that tensors lack.
    """

    def __init__(self, transfers: CudaTransfers, array: Array, tensor: DeviceTensor) -> None:
        if array.nbytes % _WORD or not array.flags.c_contiguous:
            raise ValueError(f"array: expected contiguous 4-byte words, got {array.dtype}{list(array.shape)}")
        super().__init__(array, tensor)
        self._transfers = transfers
        self._bytes: Bytes = array.reshape(-1).view(np.uint8)
        self._row_bytes = tensor.row_bytes
        self._pinned: Bytes | None = None

    def of(self, view: Array) -> Any:
        return self.tensor.at(offset_in(self.array, view), element_of(view.dtype), view.shape)

    def upload(self, begin: int = 0, end: int | None = None) -> None:
        self._transfers.up.append(self._piece(begin, end))

    def download(self, begin: int = 0, end: int | None = None) -> None:
        if self._pinned is None:
            self._pinned = self._transfers.pinned(self.array.nbytes)
        self._transfers.start_download(self._piece(begin, end), self._pinned)

    def fetcher(self) -> CudaFetcher:
        return CudaFetcher(self._transfers, self._piece(0, None))

    def _piece(self, begin: int, end: int | None) -> Piece:
        rows = self.array.shape[0]
        end = rows if end is None else end
        if not 0 <= begin <= end <= rows:
            raise ValueError(f"rows: expected some of {rows}, got {begin}..{end}")
        first = begin * self._row_bytes // _WORD * _WORD
        last = -(-end * self._row_bytes // _WORD) * _WORD
        return Piece(self.tensor, self._bytes, first, last)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes [begin, end) of a buffer: whole words."""

    tensor: DeviceTensor
    host: Bytes
    begin: int
    end: int

    @property
    def address(self) -> int:
        return self.tensor.address + self.begin

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class CudaFetcher(Fetcher):
    """A fetcher of a GPU."""

    def __init__(self, transfers: CudaTransfers, piece: Piece) -> None:
        self._transfers, self._piece = transfers, piece
        self._pinned = transfers.pinned(piece.num_bytes)
        self._copied = transfers.event()

    def start(self) -> None:
        self._transfers.start_copy_back(self._piece, self._pinned)
        self._copied.record()

    def take(self) -> None:
        self._copied.wait()
        self._transfers.verify()
        self._piece.host[self._piece.begin : self._piece.end] = self._pinned


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Return the same bytes in disjoint pieces, as the kernel scatters them in any order."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.address):
        last = merged[-1] if merged else None
        if last is not None and last.host is piece.host and piece.begin <= last.end:
            merged[-1] = Piece(last.tensor, last.host, last.begin, max(last.end, piece.end))
        elif piece.num_bytes:
            merged.append(piece)
    return merged


def _parts(pieces: list[Piece], num_bytes: int, row_bytes: int) -> Iterator[list[Piece]]:
    """Yield the same bytes in lists that fit into `num_bytes`, each piece with a table row of `row_bytes`."""
    part, left = list[Piece](), num_bytes
    for piece in pieces:
        begin = piece.begin
        while begin < piece.end:
            if left < row_bytes + _WORD:
                yield part
                part, left = [], num_bytes
            end = min(piece.end, begin + (left - row_bytes) // _WORD * _WORD)
            is_whole = end - begin == piece.num_bytes
            part.append(piece if is_whole else Piece(piece.tensor, piece.host, begin, end))
            left -= row_bytes + end - begin
            begin = end
    if part:
        yield part


class CudaTransfers:
    """Uploads and downloads, in order with all other work on the device's stream.

    Attributes:
        up: pieces to upload.
        on_wait: called after a wait and before results are used; raise ValueError if the results are invalid.
    """

    def __init__(self, library: CudaLibrary, memory: CudaMemory, stream: int) -> None:
        self._library, self._stream = library, stream
        self._staging = [StagingMemory(library, memory, STAGING_BYTES) for _ in range(NUM_STAGING)]
        self._turn = 0
        self._piece_type: Any = struct_type("ScatterPiece")
        self._params: Any = struct_type("ScatterPiecesParams")()
        self.up: list[Piece] = []
        self._down: list[tuple[Bytes, Bytes]] = []
        self.on_wait: list[Callable[[], None]] = []

    def send(self) -> None:
        """Upload all pieces.

        Raises ValueError: a copy was refused. All pieces stay in `up`: the next call must not run without them.
        """
        if not self.up:
            return
        self.up = _merged(self.up)
        for part in _parts(self.up, STAGING_BYTES, ctypes.sizeof(self._piece_type)):
            self._send_part(part)
        self.up = []

    def _send_part(self, pieces: list[Piece]) -> None:
        staging = self._next_staging()
        table = (self._piece_type * len(pieces)).from_buffer(staging.host)
        begin = ctypes.sizeof(table)
        for i, piece in enumerate(pieces):
            size = piece.num_bytes
            staging.host[begin : begin + size] = piece.host[piece.begin : piece.end]
            table[i].to, table[i].begin, table[i].num_bytes = piece.address, begin, size
            begin += size
        call = self._library.call
        call("start_copy", staging.address, address(staging.host), ctypes.c_int64(begin), self._stream)
        self._params.num_pieces = len(pieces)
        self._params.max_num_bytes = max(piece.num_bytes for piece in pieces)
        self._params.pieces = self._params.bytes = staging.address
        call("scatter_pieces", ctypes.byref(self._params), self._stream)
        call("event_record", staging.event.address, self._stream)

    def pinned(self, num_bytes: int) -> Bytes:
        """Return u8[num_bytes] for downloads; raises MemoryError."""
        return pinned_zeros(self._library, num_bytes)

    def event(self) -> CudaEvent:
        """Return an event of the stream."""
        return CudaEvent(self._library, self._stream)

    def start_copy_back(self, piece: Piece, pinned: Bytes) -> None:
        """Start to copy a piece to pinned memory of its size, after the calls so far."""
        self._library.call("start_copy", address(pinned), piece.address, ctypes.c_int64(piece.num_bytes), self._stream)

    def start_download(self, piece: Piece, pinned: Bytes) -> None:
        """Start to copy a piece to pinned memory after the calls so far. `finish` completes it."""
        pinned = pinned[piece.begin : piece.end]
        self.start_copy_back(piece, pinned)
        self._down.append((piece.host[piece.begin : piece.end], pinned))

    def finish(self) -> None:
        """Wait for the device, and put downloads in their arrays.

        Raises ValueError: as `on_wait`; DeviceLost: a kernel failed; nothing was downloaded.
        """
        arrived: Sequence[tuple[Bytes, Bytes]] = self._down
        self._down = []
        self._library.call("stream_synchronize", self._stream)
        self.verify()
        for host, pinned in arrived:
            host[:] = pinned

    def verify(self) -> None:
        """Call `on_wait`."""
        for verify in self.on_wait:
            verify()

    def _next_staging(self) -> StagingMemory:
        self._turn = (self._turn + 1) % NUM_STAGING
        staging = self._staging[self._turn]
        self._library.call("event_synchronize", staging.event.address)
        return staging
