"""A real server in processes of its own, started the way a user starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SERVING = re.compile(r"serving .* on (http://\S+)")
STOP_TIMEOUT_S = 120


class ServerProcess:
    """A running server.

    Attributes:
        url: where it listens.
        log: the lines it has printed so far.
    """

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = self._read_url()
        # From here on a thread must read, or a full pipe would stop the server.
        self._reader = threading.Thread(target=self._read_rest, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_kb(self) -> int:
        """Return the resident memory of the server and all its descendants, in KiB."""
        return sum(_resident_kb(pid) for pid in _family(self.pid))

    def stop(self) -> int:
        """Ask it to stop as a service manager does and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once, if it still runs, and release the pipe. May be called again."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read_url(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            found = _SERVING.search(line)
            if found:
                return found[1]
        self._process.stderr.close()
        raise AssertionError(f"the server ended with {self._process.wait()}:\n{''.join(self.log)}")

    def _read_rest(self) -> None:
        assert self._process.stderr is not None
        self.log.extend(self._process.stderr)


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    """Start a server and kill it at the end, should it still run then."""
    server = ServerProcess(list(arguments))
    try:
        yield server
    finally:
        server.kill()


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in _family(int(child)))]


def _resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
