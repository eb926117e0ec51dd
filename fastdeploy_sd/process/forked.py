"""The client's side of a fork server: starts it, asks it for workers, calls them, and kills them when it must.

Belongs to one event loop. Knows nothing of what the calls do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping
from typing import cast

from fastdeploy_sd.process.child import ChildProcess
from fastdeploy_sd.process.fork_server import ASK, STARTED, TELL
from fastdeploy_sd.process.fork_worker import CALL, RESULT, WorkerLimits

_FUNCTION = "fastdeploy_sd.process.fork_server:main"
_SENT_BYTES = 1 << 16  # at a time


class WorkerEndedError(Exception):
    """A worker ended before it had answered.

    Attributes:
        status: as `ChildProcess.wait` returns it.
        note: what the call was doing, see `fork_worker.Note`.
    """

    def __init__(self, status: int, note: str = "") -> None:
        super().__init__(f"the worker ended with status {status}")
        self.status, self.note = status, note


class ForkServerEndedError(Exception):
    """The fork server is gone, and its workers with it."""


class ForkServer:
    """A running fork server.

    Args:
        loader: "module:function" of a `fork_server.Loader`.
        start: "name" for its log lines and "config" for the loader.
    """

    def __init__(self, loader: str, start: Mapping[str, str]) -> None:
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with remote:
            values = {**start, "loader": loader, "control": str(remote.fileno())}
            self._process = ChildProcess(_FUNCTION, values, pass_fds=[remote.fileno()], ignores_signals=True)
        self._asked: deque[asyncio.Future[Worker]] = deque()
        self._workers: dict[int, Worker] = {}
        self._is_reading = False
        self.is_closed = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def fork(self, limits: WorkerLimits) -> Worker:
        """Return a new worker; waits while the server still loads.

        Raises:
            ForkServerEndedError: there is none to ask.
        """
        if self.is_closed:
            raise ForkServerEndedError
        loop = asyncio.get_running_loop()
        if not self._is_reading:
            loop.add_reader(self._control.fileno(), self._read)
            self._is_reading = True
        future: asyncio.Future[Worker] = loop.create_future()
        own, remote = socket.socketpair()
        try:
            with remote:
                self._ask(limits, remote, future)
            worker = await future
        except BaseException:
            own.close()
            raise
        try:
            await worker.connect(own)
        except BaseException:
            worker.close()
            raise
        return worker

    def _ask(self, limits: WorkerLimits, remote: socket.socket, future: asyncio.Future[Worker]) -> None:
        self._asked.append(future)
        record = ASK.pack(limits.nice, limits.memory_bytes, limits.cpu_s)
        try:
            socket.send_fds(self._control, [record], [remote.fileno()])
        except OSError:
            self.close()

    def close(self) -> None:
        """End the server and its workers; may be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._is_reading:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._process.close()
        for future in self._asked:
            if not future.done():
                future.set_exception(ForkServerEndedError())
        for worker in list(self._workers.values()):
            worker.close()
            worker.set_ended(-signal.SIGKILL)

    def _read(self) -> None:
        """Take what the server tells."""
        try:
            record, fds, _, _ = socket.recv_fds(self._control, TELL.size, 1)
        except BlockingIOError:
            return
        except OSError:
            record, fds = b"", []
        if not record:
            self.close()
            return
        kind, pid, status = TELL.unpack(record)
        if kind == STARTED:
            self._begin(Worker(pid, fds[0]))
        elif pid in self._workers:
            self._workers.pop(pid).set_ended(status)

    def _begin(self, worker: Worker) -> None:
        future = self._asked.popleft()
        self._workers[worker.pid] = worker
        if future.done():  # whoever asked has left
            worker.close()
        else:
            future.set_result(worker)


class Worker(asyncio.Protocol):
    """A forked worker, called by one task at a time.

    Attributes:
        pid: process id.
        note: what its call is doing, see `fork_worker.Note`.
    """

    def __init__(self, pid: int, process_fd: int) -> None:
        self.pid, self.note = pid, ""
        self._process_fd = process_fd
        self._transport: asyncio.Transport | None = None
        self._result: asyncio.Future[bytes] | None = None
        self._received = bytearray()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connect(self, connection: socket.socket) -> None:
        """Take the socket to the worker; before the first call."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    async def tell(self, name: str, payload: bytes) -> None:
        """Send a call without waiting for a result."""
        assert self._transport is not None, "called before it is connected"
        self._transport.write(CALL.pack(name.encode(), len(payload)) + payload[:_SENT_BYTES])
        for start in range(_SENT_BYTES, len(payload), _SENT_BYTES):
            await self._has_room.wait()  # the transport copies what it cannot send at once
            if self._transport.is_closing():
                return  # the call learns it from `connection_lost`
            self._transport.write(payload[start : start + _SENT_BYTES])

    async def call(self, name: str, payload: bytes) -> bytes:
        """Send a call and wait for its result. A worker whose call was cancelled is of no more use: close it.

        Raises:
            WorkerEndedError: it ended instead.
        """
        self._result, self.note = asyncio.get_running_loop().create_future(), ""
        if self._transport is None or self._transport.is_closing():
            raise WorkerEndedError(await self._ended)
        await self.tell(name, payload)
        try:
            return await self._result
        except ConnectionResetError:
            raise WorkerEndedError(await self._ended, self.note) from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= RESULT.size:
            size, is_note = RESULT.unpack_from(self._received)
            end = RESULT.size + size
            if len(self._received) < end:
                return
            content = bytes(self._received[RESULT.size : end])
            del self._received[:end]
            if is_note:
                self.note = content.decode()
            elif self._result is not None and not self._result.done():
                self._result.set_result(content)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the call that waits (asyncio)."""
        self._has_room.set()
        if self._result is not None and not self._result.done():
            self._result.set_exception(ConnectionResetError())

    @property
    def is_running(self) -> bool:
        """Whether it can be called."""
        return not self._ended.done()

    def close(self) -> None:
        """Kill it, whatever it is doing; a call that waits for it learns that. May be called twice."""
        if self._process_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process_fd, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()

    def set_ended(self, status: int) -> None:
        """Note that it is gone."""
        if self.is_running:
            os.close(self._process_fd)
            self._process_fd = -1
            self._ended.set_result(status)
