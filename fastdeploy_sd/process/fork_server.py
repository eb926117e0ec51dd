"""The process that forks workers: it has loaded what they need once, and has one thread, so that forking is safe.

A worker is ready within milliseconds, shares all that was loaded, runs under limits of its own, and may be killed at
any moment; its parent here collects it and says how it ended. Knows neither what is loaded nor what workers do.

On the control socket one record asks for a worker (`WorkerLimits` and the worker's socket), one answers it (pid and a
process descriptor), and one tells of each end (pid and status).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
from collections.abc import Callable

from fastdeploy_sd.process.child import EXIT_FAILED, EXIT_OK, configure_logging, read_start
from fastdeploy_sd.process.fork_worker import Setup, WorkerLimits, run_worker

logger = logging.getLogger(__name__)

ASK = struct.Struct("<iqi")  # WorkerLimits: nice, memory_bytes, cpu_s
TELL = struct.Struct("<Bqi")  # kind, pid, status
STARTED, ENDED = 0, 1
_STDIN_FD = 0

Loader = Callable[[str], Setup]


def main() -> int:
    """Entry point of the process."""
    start = read_start()
    configure_logging(start["name"])
    # Its threads would not survive a fork, and each worker is meant to use one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    module, name = start["loader"].split(":")
    loader: Loader = getattr(importlib.import_module(module), name)
    setup = loader(start["config"])
    gc.collect()
    gc.freeze()  # or the first collection in every worker would copy what they share
    with socket.socket(fileno=int(start["control"])) as control:
        return _ForkServer(control, setup).run()


class _ForkServer:
    """Forks on demand until its parent is gone, and then kills what it forked."""

    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control = control
        self._setup = setup
        self._pid_of_fd: dict[int, int] = {}
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(_STDIN_FD, select.POLLIN)

    def run(self) -> int:
        try:
            while True:
                for fd, _ in self._poller.poll():
                    if fd in self._pid_of_fd:
                        self._collect(fd)
                    elif fd == _STDIN_FD or not self._take():
                        return EXIT_OK
        except (BrokenPipeError, ConnectionResetError):
            return EXIT_OK  # the parent is gone
        finally:
            self._kill_all()

    def _take(self) -> bool:
        """Fork the worker that is asked for; False when nobody is left to ask."""
        record, fds, _, _ = socket.recv_fds(self._control, ASK.size, 1)
        if not record:
            return False
        with socket.socket(fileno=fds[0]) as connection:
            self._fork(WorkerLimits(*ASK.unpack(record)), connection)
        return True

    def _fork(self, limits: WorkerLimits, connection: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_worker(limits, connection)
        fd = os.pidfd_open(pid)
        self._pid_of_fd[fd] = pid
        self._poller.register(fd, select.POLLIN)
        socket.send_fds(self._control, [TELL.pack(STARTED, pid, 0)], [fd])

    def _become_worker(self, limits: WorkerLimits, connection: socket.socket) -> None:
        """Never returns: what the parent would do at its end is not for the worker."""
        status = EXIT_FAILED
        try:
            self._control.close()
            for fd in self._pid_of_fd:
                os.close(fd)
            run_worker(self._setup, limits, connection)
            status = EXIT_OK
        except (BrokenPipeError, ConnectionResetError):
            pass  # its client has left
        except Exception:
            logger.exception("a worker failed")
        finally:
            os._exit(status)

    def _collect(self, fd: int) -> None:
        self._poller.unregister(fd)
        pid = self._pid_of_fd.pop(fd)
        _, status = os.waitpid(pid, 0)
        os.close(fd)
        self._control.send(TELL.pack(ENDED, pid, os.waitstatus_to_exitcode(status)))

    def _kill_all(self) -> None:
        for fd in self._pid_of_fd:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
