"""Pages through shared memory of one machine: a window without a name, handed over through a Unix socket.

The decode instance makes the window (a memfd), and sends its descriptor to the abstract Unix socket that the prefill
instance named on the authenticated connection, with a token that was told there too. The socket takes descriptors from
processes of the same user only. Neither leaves a name, whichever way a process ends.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.disaggregation.transfer.messages import Receiver
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, Pages
from fastdeploy_sd.disaggregation.transports.transport import (
    Batch,
    CopyingReceiver,
    PlacedAtOnce,
    TransportError,
    gather,
)

TOKEN_BYTES = 32
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_WAITING = 64  # descriptors that were not asked for yet
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class DescriptorInbox:
    """The prefill instance's Unix socket, for one thread; `fd` is readable while `accept` has something to do."""

    def __init__(self) -> None:
        self.name = f"fdsd-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self.name}")
        self.fd = self._socket.fileno()
        self._waiting: OrderedDict[str, int] = OrderedDict()

    def take(self, token: str) -> int:
        """Return the descriptor that was handed over under a token, for the caller to close; else TransportError."""
        self.accept()
        fd = self._waiting.pop(token, None)
        if fd is None:
            raise TransportError("ipc: no shared memory was handed over")
        return fd

    def close(self) -> None:
        self._socket.close()
        for fd in self._waiting.values():
            os.close(fd)
        self._waiting.clear()

    def accept(self) -> None:
        """Take what has been handed over by processes of this user."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_WAITING):
                self._accept_one()

    def _accept_one(self) -> None:
        space = socket.CMSG_SPACE(_DESCRIPTOR.size) + socket.CMSG_SPACE(_CREDENTIALS.size)
        token, parts, _, _ = self._socket.recvmsg(TOKEN_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for _, kind, data in parts if kind == socket.SCM_RIGHTS for (fd,) in _DESCRIPTOR.iter_unpack(data)]
        users = [_CREDENTIALS.unpack(data)[1] for _, kind, data in parts if kind == socket.SCM_CREDENTIALS]
        key = token.decode("ascii", "replace")
        if len(fds) == 1 and users == [os.getuid()] and key not in self._waiting:
            self._waiting[key] = fds.pop()
        if len(self._waiting) > _MAX_WAITING:
            fds.append(self._waiting.popitem(last=False)[1])
        for fd in fds:
            os.close(fd)


class IpcSender(PlacedAtOnce):
    """Copies pages into the window; TransportError: the descriptor is of something else."""

    def __init__(self, fd: int, offer: Receiver) -> None:
        super().__init__()
        self._slot_bytes = offer.slot_bytes
        try:
            num_bytes = offer.num_slots * offer.slot_bytes
            # Sealed, it cannot become shorter: an access beyond its end would end this process.
            if os.fstat(fd).st_size != num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransportError(f"ipc: expected sealed shared memory of {num_bytes} bytes, got another file")
            self._memory = mmap.mmap(fd, num_bytes)
        except OSError as error:
            raise TransportError(f"ipc: shared memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)
        self._window: Bytes | None = np.frombuffer(self._memory, np.uint8)

    def start(self, batch: Batch, pages: Pages, block_ids: Sequence[int]) -> None:
        window = self._window
        assert window is not None, "the sender is open"
        starts = [slot * self._slot_bytes for slot in batch.slots]
        batch.checksums = tuple(
            gather(pieces, window[at : at + self._slot_bytes])[1]
            for at, pieces in zip(starts, pages.read_all(batch.layer, block_ids), strict=True)
        )
        self._finished.append(batch)

    def close(self) -> None:
        self._window = None
        self._memory.close()


class IpcReceiver(CopyingReceiver):
    """Makes the window, and copies pages out of it before they are read."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self._fd = os.memfd_create("fdsd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_slots * slot_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self._fd, num_slots * slot_bytes)
        offer = Receiver(num_slots, slot_bytes, token=secrets.token_hex(TOKEN_BYTES // 2))
        super().__init__(offer, np.frombuffer(self._memory, np.uint8))

    def hand_over(self, name: str) -> None:
        """Send the window to the abstract socket of this name, without waiting; raises as the function `hand_over`."""
        hand_over(name, self.offer.token, self._fd)

    def close(self) -> None:
        self._window = None
        self._memory.close()
        os.close(self._fd)


def hand_over(name: str, token: str, fd: int) -> None:
    """Send a descriptor to an abstract socket under a token, without waiting.

    TransportError: there is no such socket here, so the instances share no machine; or it is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as connection:
        try:
            connection.connect(f"\0{name}")
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            connection.sendmsg([token.encode("ascii")], [rights])
        except OSError as error:
            raise TransportError(f"ipc: the other instance's socket cannot be reached: {error}") from None
