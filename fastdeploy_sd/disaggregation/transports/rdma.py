"""Pages by Mooncake's Transfer Engine: remote writes into registered memory, over TCP where there is no RDMA device.

The engine authenticates no peer and listens on every address of the machine: who reaches its ports can write to the
windows registered here, and to nothing else. A page is therefore copied out of its window before its checksum, which
came over the authenticated connection, is compared. The only file that imports mooncake.

Source: github.com/kvcache-ai/Mooncake, the Python interface of its Transfer Engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.disaggregation.transfer.messages import Receiver
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, Pages
from fastdeploy_sd.disaggregation.transports.transport import Batch, CopyingReceiver, TransportError, gather

_RDMA_DEVICES = "/sys/class/infiniband"
NUM_WINDOWS = 4  # of a decode instance: further prefill instances send by another protocol
_log = logging.getLogger(__name__)


class RdmaEngine:
    """A process's Transfer Engine, and the windows that others write to. Used by one thread, but for `write`.

    All windows are registered first, because a peer reads the list of them only once. Others reach it at `session`,
    "host:port"; its ports lie between the smallest and the largest of `ports`, () = any.
    """

    def __init__(self, host: str, ports: Sequence[int], num_windows: int, window_bytes: int) -> None:
        has_device = os.path.isdir(_RDMA_DEVICES) and bool(os.listdir(_RDMA_DEVICES))
        with _environment(ports):
            try:
                from mooncake.engine import TransferEngine
            except ImportError as error:
                raise TransportError(f"rdma: Mooncake's Transfer Engine cannot be loaded: {error}") from None
            self._engine: Any = TransferEngine()
            status = self._engine.initialize(host, "P2PHANDSHAKE", "rdma" if has_device else "tcp", "")
        if status != 0:
            raise TransportError(f"rdma: Mooncake's Transfer Engine did not start (status {status}, ports {ports})")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._windows = [np.zeros(window_bytes, np.uint8) for _ in range(num_windows)]
        self._free = list(range(num_windows))
        for window in self._windows:
            self.register(window)
        how = "RDMA" if has_device else "TCP, as there is no RDMA device"
        _log.warning(
            "rdma: Mooncake's Transfer Engine (%s) listens on every address of this machine without authentication", how
        )

    def register(self, memory: Bytes) -> None:
        """Let the engine read and write this memory, or raise a TransportError."""
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
            raise TransportError(f"rdma: {memory.nbytes} bytes cannot be registered")

    def unregister(self, memory: Bytes) -> None:
        """Undo `register`; before the memory is freed."""
        self._engine.unregister_memory(memory.ctypes.data)

    def write(self, session: str, sources: list[int], targets: list[int], sizes: list[int]) -> bool:
        """Write memory of ours into memory of another engine, and wait until it is there. From any thread."""
        return bool(self._engine.batch_transfer_sync_write(session, sources, targets, sizes) == 0)

    def take_window(self) -> tuple[int, Bytes]:
        """Return a window that is free, and its number; TransportError: all are in use."""
        if not self._free:
            raise TransportError(f"rdma: all {len(self._windows)} windows are in use")
        number = self._free.pop()
        return number, self._windows[number]

    def give_back(self, number: int) -> None:
        """Undo `take_window`."""
        self._free.append(number)

    def close(self) -> None:
        """Unregister everything; the engine's ports close with its last reference."""
        for window in self._windows:
            self.unregister(window)
        self._windows = []


class RdmaSender:
    """Copies pages into registered memory and has a thread write them, so that a slow peer holds up no other."""

    def __init__(self, engine: RdmaEngine, offer: Receiver) -> None:
        self.fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._engine, self._offer = engine, offer
        self._memory = np.empty(offer.num_slots * offer.slot_bytes, np.uint8)
        engine.register(self._memory)
        self._work: queue.SimpleQueue[tuple[Batch, list[int]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of fd, which the writer must not use once it is closed
        self._thread = threading.Thread(target=self._write_all, name="fdsd-kv-rdma", daemon=True)
        self._thread.start()

    def start(self, batch: Batch, pages: Pages, block_ids: Sequence[int]) -> None:
        size = self._offer.slot_bytes
        placed = [
            gather(pieces, self._memory[slot * size : (slot + 1) * size])
            for slot, pieces in zip(batch.slots, pages.read_all(batch.layer, block_ids), strict=True)
        ]
        batch.checksums = tuple(checksum for _, checksum in placed)
        self._work.put((batch, [page.nbytes for page, _ in placed]))

    def finished(self) -> list[Batch]:
        if self.fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
        return [self._done.get() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """Have the thread end, without waiting: a write that hangs keeps its memory until Mooncake gives up."""
        with self._lock:
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None
        self._work.put(None)

    def _write_all(self) -> None:
        while (item := self._work.get()) is not None:
            if self.fd is None:
                continue  # closed: what waits is not written any more
            batch, sizes = item
            at = [slot * self._offer.slot_bytes for slot in batch.slots]
            here, there = self._memory.ctypes.data, self._offer.base
            if not self._engine.write(self._offer.session, [here + a for a in at], [there + a for a in at], sizes):
                batch.error = f"rdma: writing to {self._offer.session} failed"
            self._done.put(batch)
            with self._lock:
                if self.fd is not None:
                    os.eventfd_write(self.fd, 1)
        self._engine.unregister(self._memory)


class RdmaReceiver(CopyingReceiver):
    """A window that another engine writes to, and copies of its pages."""

    def __init__(self, engine: RdmaEngine, num_slots: int, slot_bytes: int) -> None:
        self._engine = engine
        self._number, window = engine.take_window()
        super().__init__(Receiver(num_slots, slot_bytes, session=engine.session, base=window.ctypes.data), window)

    def close(self) -> None:
        """Give the window back. What a lost peer still writes there has another checksum than what is read next."""
        self._engine.give_back(self._number)


@contextlib.contextmanager
def _environment(ports: Sequence[int]) -> Iterator[None]:
    """Have Mooncake take its ports from a range and log errors only, which it reads from the environment, once."""
    names = {"MC_MIN_PRC_PORT": str(min(ports)), "MC_MAX_PRC_PORT": str(max(ports))} if ports else {}
    names["MC_LOG_LEVEL"] = os.environ.get("MC_LOG_LEVEL", "ERROR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
