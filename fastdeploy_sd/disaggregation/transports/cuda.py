"""Pages from one GPU's memory to another's of the same machine: a window that the other process's device writes to.

The decode instance makes the window in its GPU's memory, and sends one end of a pair of sockets through the Unix
socket of transport_ipc, with the handle in it: so it gets to processes of this user on this machine only, and under a
token that was told on the authenticated connection. The sender keeps that end for as long as it has the window open:
CUDA wants memory to outlive those who have it open, and a process closes its sockets however it ends. Knows no CUDA;
see pages.DevicePort.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.disaggregation.transfer.messages import Receiver
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, DevicePage, DevicePort, Pages, Window
from fastdeploy_sd.disaggregation.transports.ipc import TOKEN_BYTES, hand_over
from fastdeploy_sd.disaggregation.transports.transport import Batch, PlacedAtOnce, TransportError
from fastdeploy_sd.errors import DeviceLost

_MAX_HANDLE_BYTES = 256
# Windows of closed receivers that others may still have open.
_MAX_LENT = 4


class CudaSender(PlacedAtOnce):
    """Has the device copy pages into the window of `fd`, which it owns; TransportError: it cannot."""

    def __init__(self, fd: int, offer: Receiver, port: DevicePort) -> None:
        super().__init__()
        self._port, self._slot_bytes = port, offer.slot_bytes
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            raise TransportError("cuda: expected a socket with a handle, got another descriptor")
        if offer.slot_bytes % port.unit_bytes:  # a device that writes there nevertheless is lost
            os.close(fd)
            text = f"cuda: expected slots of a multiple of {port.unit_bytes} bytes, got {offer.slot_bytes}"
            raise TransportError(text)
        self._lifeline = socket.socket(fileno=fd)
        try:
            self._lifeline.setblocking(False)
            handle = self._lifeline.recv(_MAX_HANDLE_BYTES)
            self._window: Window | None = port.open_window(handle, offer.num_slots * offer.slot_bytes)
        except (OSError, ValueError) as error:
            self._lifeline.close()
            raise TransportError(f"cuda: the other GPU's memory cannot be opened: {error}") from None

    def start(self, batch: Batch, _pages: Pages, block_ids: Sequence[int]) -> None:
        window = self._window
        assert window is not None, "the sender is open"
        places = [window.address + slot * self._slot_bytes for slot in batch.slots]
        self._port.send(batch.layer, block_ids, places)
        batch.checksums = (0,) * len(batch.slots)
        self._finished.append(batch)

    def close(self) -> None:
        self._window = None
        self._lifeline.close()


@dataclass(slots=True)
class _Lent:
    """A window that another process may have open, until its end of the pair of sockets is closed; `fd` is ours."""

    window: Window
    fd: int

    def is_over(self) -> bool:
        """Whether no process can have it open; call it no more then."""
        try:
            is_over = not os.read(self.fd, 1)
        except BlockingIOError:
            return False
        except OSError:
            is_over = True
        if is_over:
            os.close(self.fd)
        return is_over


# Of receivers that were closed before the other process closed its side; what is left at the end goes with the process.
_lent: list[_Lent] = []
_lock = threading.Lock()  # of the list, for connectors of one process


class CudaReceiver:
    """Makes the window, and says where pages are in it; TransportError: the device has none, or has lent too many."""

    def __init__(self, num_slots: int, slot_bytes: int, port: DevicePort) -> None:
        forget_windows()
        if len(_lent) >= _MAX_LENT:
            raise TransportError(f"cuda: {len(_lent)} windows of lost instances are still open there")
        self.offer = Receiver(num_slots, slot_bytes, token=secrets.token_hex(TOKEN_BYTES // 2))
        self._port = port
        try:
            window, handle = port.make_window(num_slots * slot_bytes)
        except ValueError as error:
            raise TransportError(f"cuda: no memory of the GPU can be shared: {error}") from None
        ours, self._theirs = socket.socketpair()
        ours.setblocking(False)
        ours.send(handle)
        self._lent = _Lent(window, ours.detach())

    def hand_over(self, name: str) -> None:
        """Send the handle to the abstract socket of this name, without waiting; raises as the function `hand_over`."""
        hand_over(name, self.offer.token, self._theirs.fileno())
        self._theirs.close()  # from here on the other process's is the only one

    def page(self, slot: int, num_bytes: int, payload: Bytes | None) -> DevicePage | None:
        """See ReceiverEnd; it stays in the window, which the sender leaves alone until the slot is its own again."""
        if payload is not None or not 0 <= slot < self.offer.num_slots or num_bytes > self.offer.slot_bytes:
            return None
        return DevicePage(self._lent.window.address + slot * self.offer.slot_bytes, num_bytes)

    def settle(self) -> None:
        self._port.finish()

    def close(self) -> None:
        with contextlib.suppress(ValueError, DeviceLost):  # which steps meet too; nothing writes any more then
            self._port.finish()
        self._theirs.close()
        with _lock:
            _lent.append(self._lent)
        forget_windows()


def forget_windows() -> None:
    """Free the windows of closed receivers that no process has open any more; a few system calls, none without such."""
    with _lock:
        _lent[:] = [lent for lent in _lent if not lent.is_over()]
