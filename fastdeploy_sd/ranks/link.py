"""A pair of connected sockets between rank 0 and another rank. They have no name, so nobody else can find them and
nothing is left of them. Knows no message."""

from __future__ import annotations

import contextlib
import socket
import struct

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
MAX_FRAME_BYTES = 1 << 30


class LinkClosedError(Exception):
    """The other end is gone."""


class Link:
    """One end: frames of bytes, in order. Used by one thread, but for `shut`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    @staticmethod
    def pair() -> tuple[Link, socket.socket]:
        """Return our end, and the one to hand to another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return Link(ours), theirs

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            LinkClosedError: the other end is gone.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"frame: expected at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise LinkClosedError(str(error)) from None

    def receive(self) -> bytes:
        """Wait for a frame.

        Raises:
            LinkClosedError: the other end is gone, or `shut` was called.
        """
        header = self._take(_LENGTH.size)
        return self._take(_LENGTH.unpack(header)[0])

    def leftover(self) -> bytes | None:
        """Return a frame that has arrived already, None if there is none."""
        self._socket.setblocking(False)
        try:
            return self.receive()
        except LinkClosedError:
            return None
        finally:
            self._socket.setblocking(True)

    def shut(self) -> None:
        """Have both ends closed for frames: whoever waits for one, in any thread, wakes up with LinkClosedError."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor."""
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
