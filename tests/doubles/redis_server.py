"""A private Redis of the distribution's package for a test: real, on a free port, with a password, writing no file."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.doubles.certificates import Certificates

WAIT_S = 120.0
PASSWORD = "a password of the tests"
MISSING = "redis-server is missing: install the distribution's package redis-server, as scripts/dev test does"


class RedisServer:
    """A running redis-server.

    Args:
        folder: where it runs.
        settings: lines of its configuration, besides ours.
        certificates: it speaks TLS only, and only with those who have one; None = it speaks no TLS.
    """

    def __init__(
        self, folder: Path, *settings: str, password: str = PASSWORD, certificates: Certificates | None = None
    ) -> None:
        self._folder, self._settings, self._password = folder, settings, password
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        access: dict[str, Any] = {}
        self._ports: tuple[str, ...] = (f"port {self.port}",)
        if certificates is not None:
            files = {"ca-cert": certificates.ca, "cert": certificates.server, "key": certificates.server_key}
            access = {"ssl": True, "ssl_ca_certs": certificates.ca}
            access |= {"ssl_certfile": certificates.client, "ssl_keyfile": certificates.client_key}
            self._ports = ("port 0", f"tls-port {self.port}", *(f"tls-{n}-file {path}" for n, path in files.items()))
        self._client = redis.Redis("127.0.0.1", self.port, password=password, socket_timeout=WAIT_S, **access)

    def start(self) -> None:
        """Start it, empty; returns when it answers."""
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail(MISSING, pytrace=False)
        own = (*self._ports, "bind 127.0.0.1", f'requirepass "{self._password}"', 'save ""', "appendonly no")
        process = subprocess.Popen([program, "-"], cwd=self._folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._process = process
        assert process.stdin is not None
        process.stdin.write("\n".join((*own, *self._settings, "")).encode())
        process.stdin.close()
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(redis.exceptions.ConnectionError):
                self._client.ping()
                return
            assert process.poll() is None, f"redis-server ended with status {process.returncode}"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        """End it at once, with all it holds."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def do(self, *command: Any) -> Any:
        """The answer to a command."""
        return self._client.execute_command(*command)  # type: ignore[no-untyped-call]

    def keys(self) -> list[str]:
        """All keys there are."""
        return sorted(key.decode() for key in self.do("KEYS", "*"))

    def wait_for_keys(self, *wanted: str) -> None:
        """Wait until these are all keys there are."""
        deadline = time.monotonic() + WAIT_S
        while self.keys() != sorted(wanted):
            assert time.monotonic() < deadline, f"expected the keys {wanted}, got {self.keys()}"
            time.sleep(0.05)

    def calls(self) -> dict[str, int]:
        """How often each command has been called."""
        return {
            name.removeprefix("cmdstat_"): stat["calls"] for name, stat in self._client.info("commandstats").items()
        }

    def close(self) -> None:
        self._client.close()
        self.stop()


@contextlib.contextmanager
def running_redis(
    folder: Path, *settings: str, password: str = PASSWORD, certificates: Certificates | None = None
) -> Iterator[RedisServer]:
    """A Redis that is ended at the end."""
    with contextlib.closing(RedisServer(folder, *settings, password=password, certificates=certificates)) as server:
        server.start()
        yield server
