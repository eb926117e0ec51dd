"""Child processes of our own: started with values that no other process can read, ended with their parent.

The parent writes one JSON line to the child's standard input and keeps the pipe open; its end tells the child that the
parent is gone, however it went. Standard error is shared, so that a child's messages reach the console as they happen.
Knows neither the engine nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from fastdeploy_sd.config.environment import LOG_DIR_VARIABLE
from fastdeploy_sd.process.log_files import LogFile, line_formatter

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2

_STDIN_FD = 0
_IGNORE_SIGNALS = (
    "from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, signal; "
    "signal(SIGTERM, SIG_IGN); signal(SIGINT, SIG_IGN); signal(SIGHUP, SIG_IGN); "
)


class ChildProcess:
    """A running "module:function" in a fresh interpreter; the function's result is the exit status.

    The child has our module search path and a session of its own, as Ctrl-C in the terminal is for the parent to
    handle.

    Args:
        function: found in the child by importing the module.
        start: what `read_start` returns in the child.
        pass_fds: descriptors the child inherits under the same numbers.
        ignores_signals: SIGTERM, SIGINT and SIGHUP do nothing to the child, from before its first import on.
    """

    def __init__(
        self, function: str, start: Mapping[str, str], pass_fds: Sequence[int] = (), *, ignores_signals: bool = False
    ) -> None:
        module, name = function.split(":")
        code = f"import sys; from {module} import {name}; sys.exit({name}())"
        # bufsize 0: no buffered byte can be lost when the child ends before it has read the line.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _IGNORE_SIGNALS + code if ignores_signals else code],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        with contextlib.suppress(BrokenPipeError):  # then its exit status tells the story
            self._stdin.write(json.dumps(start).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._popen.poll() is None

    @property
    def status(self) -> int | None:
        """What `wait` returns, None as long as the process has not ended."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Wait for the end; return the exit status, or minus the number of the signal that ended the process."""
        if not self.is_running:
            return self._popen.wait()
        ended = asyncio.Event()
        fd = os.pidfd_open(self.pid)  # not reaped yet, so the id is still this process's
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._popen.send_signal(number)

    def tell(self) -> None:
        """Have what the child gave `end_with_parent` as `heard` called there, unless it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b"\n")

    def close(self) -> None:
        """Free everything; a process that still runs is killed."""
        self._popen.kill()
        self._popen.wait()
        self._stdin.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin


def read_start() -> dict[str, str]:
    """Return the values the parent gave to this child process."""
    with open(_STDIN_FD, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: the pipe stays ours to watch
        start: dict[str, str] = json.loads(stdin.readline())
    return start


def end_with_parent(before: Callable[[], object] = lambda: None, heard: Callable[[], object] = lambda: None) -> None:
    """From now on end this process with status 1 as soon as its parent ends; `before` runs first, in another thread.

    At once also when the main thread is inside a long computation; nothing is cleaned up but by `before`. `heard`:
    called, in that thread too, whenever the parent uses `ChildProcess.tell`.
    """

    def watch() -> None:
        while os.read(_STDIN_FD, 1):
            heard()
        before()
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def leave_within(timeout_s: float, status: int) -> None:
    """End this process with `status` after so long at the latest, even if some thread of it goes on computing.

    Python waits for its threads before it ends, for ever if need be.
    """
    timer = threading.Timer(timeout_s, os._exit, (status,))
    timer.daemon = True
    timer.start()


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a server to stop: SIGTERM, Ctrl-C and, unless it is ignored (nohup), SIGHUP."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` in the running event loop on every signal that asks for it."""
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop)


def describe_exit(status: int) -> str:
    """Exit status or minus signal number in words."""
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def configure_logging(process: str) -> None:
    """Log to standard error and, in FD_LOG_DIR if it is set, to a file; every line names the kind of process.

    Does nothing where logging is configured already. Raises ConfigError: the file cannot be written, or the variable of
    the format has another value than those that it may have.
    """
    if logging.root.handlers:
        return
    formatter = line_formatter(process)
    folder = os.environ.get(LOG_DIR_VARIABLE)
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if folder:
        handlers.append(LogFile(Path(folder), process.replace(" ", "-")))
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=handlers)
