"""Runs hostile work in forked worker processes, under limits on memory and time; the client's side, for any thread."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref

from fastdeploy_sd.process.child import ChildProcess
from fastdeploy_sd.process.sandbox_worker import CALL, FORK, LIFELINE, RESULT, WorkerLimits

_FUNCTION = "fastdeploy_sd.process.sandbox_worker:main"
# A worker that uses no processor time is stuck; one that gets little of it needs longer by the clock.
_CLOCK_S_PER_CPU_S = 6
# How a worker ends that passes a limit: the kernel ends it, or a library finds no memory, or no room on the stack.
EXCESS = {-signal.SIGXCPU: "time", -signal.SIGABRT: "memory", -signal.SIGSEGV: "memory"}


class WorkerEndedError(Exception):
    """A worker ended before it had answered.

    Attributes:
        status: exit status, or minus the number of the signal that ended it.
        note: what the call was doing, see `sandbox_worker.Note`.
    """

    def __init__(self, status: int, note: str = "") -> None:
        super().__init__(f"the worker ended with status {status}")
        self.status, self.note = status, note


class SandboxEndedError(Exception):
    """There is no process to fork workers from: the sandbox is closed, or the process ends as soon as it is started."""


class Sandbox:
    """The process that workers are forked from. It is started by `start` or the first fork, and again if it ends.

    Args:
        loader: "module:function" of a `sandbox_worker.Loader`, which gets `config`.
        name: of the process, in its log lines.
    """

    def __init__(self, loader: str, name: str, config: str) -> None:
        self._start_values = {"loader": loader, "name": name, "config": config}
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._control: socket.socket | None = None
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it runs; raises SandboxEndedError where the sandbox is closed."""
        with self._lock:
            self._started()

    def fork(self, limits: WorkerLimits, setup: bytes = b"") -> Worker:
        """Return a new worker, with `setup` for its `sandbox_worker.Setup`; raises SandboxEndedError."""
        for _ in range(2):  # the process may have been killed, which shows when it is asked
            with self._lock:
                control = self._started()
            connection, remote = socket.socketpair()
            lifeline, remote_lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with remote, remote_lifeline:
                    record = FORK.pack(limits.nice, limits.memory_bytes, limits.cpu_s)
                    socket.send_fds(control, [record], [remote.fileno(), remote_lifeline.fileno()])
                pid, fds, _, _ = socket.recv_fds(lifeline, LIFELINE.size, 1)
            except OSError:
                pid, fds = b"", []
            if pid:
                for end in (connection, lifeline):
                    end.settimeout(_CLOCK_S_PER_CPU_S * limits.cpu_s)
                worker = Worker(LIFELINE.unpack(pid)[0], fds[0], connection, lifeline)
                with self._lock:
                    self._workers.add(worker)
                    if self._is_closed:
                        worker.kill()
                worker.send("setup", setup)
                return worker
            connection.close()
            lifeline.close()
            with self._lock:
                if self._control is control:
                    self._end()
        raise SandboxEndedError

    def close(self) -> None:
        """End the process and its workers; may be called twice."""
        with self._lock:
            self._is_closed = True
            self._end()
            for worker in self._workers:  # one that is stopped may not have been told to end with its parent
                worker.kill()

    def _started(self) -> socket.socket:
        if self._is_closed:
            raise SandboxEndedError
        if self._control is None:
            self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with remote:
                values = {**self._start_values, "control": str(remote.fileno())}
                self._process = ChildProcess(_FUNCTION, values, pass_fds=[remote.fileno()], ignores_signals=True)
        return self._control

    def _end(self) -> None:
        if self._process is not None and self._control is not None:
            self._process.close()
            self._control.close()
        self._process = self._control = None


class Worker:
    """A forked worker, called by one thread at a time; the lifeline tells how the process ended."""

    def __init__(self, pid: int, process_fd: int, connection: socket.socket, lifeline: socket.socket) -> None:
        self.pid = pid
        self._process_fd = process_fd
        self._connection, self._lifeline = connection, lifeline
        self._lock = threading.Lock()

    def send(self, name: str, payload: bytes) -> None:
        """Send a call without waiting for a result; `call` says so if the worker has ended."""
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(CALL.pack(name.encode(), len(payload)))
            self._connection.sendall(payload)

    def call(self, name: str, payload: bytes) -> bytes:
        """Return the result of a call; raises WorkerEndedError where the worker ended instead, or was stuck."""
        note = ""
        try:
            self.send(name, payload)
            while True:
                size, is_note = RESULT.unpack(self._receive(RESULT.size))
                content = self._receive(size)
                if not is_note:
                    return content
                note = content.decode()
        except TimeoutError:
            raise WorkerEndedError(-signal.SIGXCPU, note) from None
        except OSError:
            raise WorkerEndedError(self._status(), note) from None

    def kill(self) -> None:
        """Kill the process, whatever it is doing; a call that waits for it learns that. For any thread."""
        with self._lock:
            if self._process_fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process_fd, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and free everything; may be called twice."""
        self.kill()
        with self._lock:
            if self._process_fd >= 0:
                os.close(self._process_fd)
            self._process_fd = -1
        self._connection.close()
        self._lifeline.close()

    def _receive(self, size: int) -> bytes:
        received = bytearray(size)
        rest = memoryview(received)
        while rest:
            num_bytes = self._connection.recv_into(rest)
            if num_bytes == 0:
                raise ConnectionResetError
            rest = rest[num_bytes:]
        return bytes(received)

    def _status(self) -> int:
        try:
            record = self._lifeline.recv(LIFELINE.size)
        except OSError:
            record = b""
        return int(LIFELINE.unpack(record)[0]) if record else -signal.SIGKILL  # as its parent was, and so it too
