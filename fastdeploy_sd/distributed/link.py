"""Connected sockets between rank 0 and another rank, or a relay of their bytes to another host; they have no name."""

from __future__ import annotations

import contextlib
import socket
import struct

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
MAX_FRAME_BYTES = 1 << 30


class LinkClosedError(Exception):
    """The other end is gone."""


class RankLink:
    """One end: frames of bytes, in order. Used by one thread, but for `shut`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    @staticmethod
    def pair() -> tuple[RankLink, socket.socket]:
        """Return our end, and the one to hand to another process."""
        ours, theirs = _connected()
        return RankLink(ours), theirs

    def send(self, frame: bytes) -> None:
        """Send a frame; raises LinkClosedError where the other end is gone."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"frame: expected at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise LinkClosedError(str(error)) from None

    def receive(self) -> bytes:
        """Wait for a frame; raises LinkClosedError where the other end is gone, or `shut` was called."""
        header = self._take(_LENGTH.size)
        return self._take(_LENGTH.unpack(header)[0])

    def leftover(self) -> bytes | None:
        """Return a frame that has arrived, else None."""
        self._socket.setblocking(False)
        try:
            return self.receive()
        except LinkClosedError:
            return None
        finally:
            self._socket.setblocking(True)

    def shut(self) -> None:
        """Close both ends for frames: every thread that waits for one gets LinkClosedError."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                data = self._socket.recv(max(_CHUNK, count - len(self._buffer)))
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            if not data:
                raise LinkClosedError("the other end is closed")
            self._buffer += data
        taken = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        return taken


class Relay:
    """The other end of a link whose bytes are forwarded; it never blocks, and belongs to one thread.

    Attributes:
        fd: readable when `take` has something.
        has_backlog: whether given bytes wait for the link to be read.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._backlog = bytearray()
        self._is_open = True
        self.fd = end.fileno()

    @staticmethod
    def pair() -> tuple[Relay, socket.socket]:
        """Return a relay, and the link's end to hand to another process."""
        ours, theirs = _connected()
        return Relay(ours), theirs

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def take(self, most_bytes: int) -> bytes | None:
        """Return the bytes written at the link's end, b"" = none; None = that end is closed."""
        try:
            return self._socket.recv(most_bytes) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def give(self, data: bytes) -> None:
        """Queue bytes for the link's end; they are dropped when this end is closed."""
        if self._is_open:
            self._backlog += data
            self.flush()

    def flush(self) -> None:
        """Write queued bytes, as far as the socket has room."""
        while self._backlog:
            try:
                count = self._socket.send(self._backlog[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                count = len(self._backlog)
            del self._backlog[:count]

    def close(self) -> None:
        """Write queued bytes as far as the socket has room, and close it: the link's end reads them, then its end."""
        if self._is_open:
            self.flush()
            self._backlog.clear()
            self._is_open = False
            self._socket.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ends
