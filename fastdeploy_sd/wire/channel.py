"""The sockets: one ROUTER in the engine process, one DEALER in every client process. The only file that imports zmq.

Frames are opaque bytes here. Nothing is ever dropped for being late: high-water marks are off on both sides, because
what can wait is bounded elsewhere. A client that reads nothing also submits nothing, so at most the remaining tokens
of its running requests pile up for it; a busy engine leaves at most the submissions of the open HTTP requests unread.
Neither side ever blocks in send, so a stalled client cannot stall the engine or the other clients.

Whether the other process still lives is asked of the kernel (a process file descriptor becomes readable the moment the
process ends), not guessed from silence: an engine step or a tokenizer call may rightly take seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import zmq

from fastdeploy_sd.errors import ConfigError, shown

# A client may start long before the engine listens; it then tries again this often, without a line in the log.
_RECONNECT_MS = 20
_MAX_RECONNECT_MS = 200
_MAX_PATH_BYTES = 100  # a Unix socket path holds 107
_PREFIX = "fdsd-"
_LOCK = "lock"
_MAX_REMOVALS = 100


@contextmanager
def private_address() -> Iterator[str]:
    """Yield an address that only this user can reach, in a directory of mode 0700 that is removed afterwards;
    ConfigError: the system's directory for temporary files cannot be used.
    """
    parent = tempfile.gettempdir()
    path = os.path.join(parent, f"{_PREFIX}{'x' * 8}", "engine")  # as long as the real one
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"TMPDIR: expected a directory whose name leaves room for a socket, got {shown(parent)}")
    _remove_abandoned(parent)
    try:
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    except OSError as error:
        raise ConfigError(f"TMPDIR: expected a directory to write in, got {shown(parent)}: {error}") from None
    try:
        with _held(directory):
            yield f"ipc://{os.path.join(directory, 'engine')}"
    finally:
        remove_directory(directory)


@contextmanager
def _held(directory: str) -> Iterator[None]:
    """Hold a lock on the directory's lock file, which the kernel drops when this process ends, however that happens."""
    unlocked, locked = os.path.join(directory, "unlocked"), os.path.join(directory, _LOCK)
    with open(unlocked, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(unlocked, locked)  # it never exists without the lock
        yield


def _remove_abandoned(parent: str) -> None:
    """Remove the directories of this user's servers that were killed together with their engines."""
    for lock in glob.glob(os.path.join(glob.escape(parent), f"{_PREFIX}*", _LOCK)):
        with contextlib.suppress(OSError), open(lock, "rb") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its server lives
                remove_directory(os.path.dirname(lock))


def remove_directory(directory: str) -> None:
    """Remove a server's directory, also while its processes still write files there: they find it gone."""
    ended = f"{directory}-ended"
    with contextlib.suppress(OSError):
        os.rename(directory, ended)
    for _ in range(_MAX_REMOVALS):  # a file that was being opened during the rename appears in the renamed directory
        shutil.rmtree(ended, ignore_errors=True)
        if not os.path.exists(ended):
            return


def directory_of(address: str) -> str:
    """Return the directory that `private_address` made for this address."""
    return os.path.dirname(address.removeprefix("ipc://"))


class ServerChannel:
    """The engine's end, for one thread; a peer that sends more than `max_message_bytes` (-1 = no limit) is cut."""

    def __init__(self, address: str, max_message_bytes: int = -1) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unreachable client is an error we see, not a silent drop
        self._poller = zmq.Poller()
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close(linger_s=0)
            raise
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`; before the descriptor is closed."""
        self._poller.unregister(fd)

    def wait(self, timeout_s: float | None) -> set[int]:
        """Block until a frame or a watched descriptor is readable, or the time is over (None = no limit, 0 = no wait);
        returns the readable descriptors among the watched ones.
        """
        timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000))
        ready = self._poller.poll(timeout_ms)
        return {source for source, _ in ready if isinstance(source, int)} if ready else set()

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (client identity, frame) of everything that has arrived, without blocking.

        A message of more than one part, which no client of ours sends, comes as an empty frame.
        """
        while cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than the exception that says no
            identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            yield identity, parts[0] if len(parts) == 1 else b""

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Queue a frame for a client, never blocking; False when the client is gone."""
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self, linger_s: float) -> None:
        """Close; frames still queued get that long to leave."""
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()


class ClientChannel:
    """A client's end, for the running event loop. The engine may bind the address later.

    The loop watches the socket's descriptor, which ZMQ makes readable once when something may have arrived. Sending may
    make it unreadable again. So after a wake-up and after every send the socket is read until it is empty.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._arrival: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._wake_reader)

    def send(self, frame: bytes) -> None:
        """Queue a frame and return at once: without a high-water mark the queue always has room."""
        self._socket.send(frame, zmq.NOBLOCK)
        self._wake_reader()

    async def receive(self) -> bytes:
        """Wait for the next frame; an empty one stands for a message of several parts, which the engine never sends.

        For one task at a time.
        """
        while not self._has_arrived():
            self._arrival = self._loop.create_future()
            await self._arrival
        parts = self._socket.recv_multipart(zmq.NOBLOCK)
        return parts[0] if len(parts) == 1 else b""

    def close(self, linger_s: float) -> None:
        """Close; frames still queued get that long to leave."""
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()

    def _wake_reader(self) -> None:
        if self._arrival is not None and not self._arrival.done() and self._has_arrived():
            self._arrival.set_result(None)

    def _has_arrived(self) -> bool:
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
