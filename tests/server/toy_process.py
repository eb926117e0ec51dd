"""A whole server as processes over the toy model, with real sockets and signals; what it logs is kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

WAIT_S = 120.0
_EXECUTORS = "tests.server.lifecycle_executors"
START_SCRIPT = (
    "import json, sys\n"
    "from fastdeploy_sd.config import config_from_kwargs\n"
    "from fastdeploy_sd.entrypoints import launch\n"
    "sys.exit(launch.run([config_from_kwargs(**json.loads(sys.argv[1]))], sys.argv[2]))\n"
)


class Program:
    """A process and what it has written to standard error."""

    def __init__(self, argv: Sequence[str], **env: str) -> None:
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._is_ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    @property
    def stderr(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def wait_for_line(self, pattern: str, timeout_s: float = WAIT_S) -> re.Match[str]:
        """Wait for the first line that matches."""

        def find() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self._lines)), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._is_ended, timeout_s)
            match = find()
            assert match is not None, f"no line {pattern!r} in:\n{''.join(self._lines)}"
            return match

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many HTTP processes serve; the line `url` is read from comes before they do."""
        for number in range(1, count + 1):
            self.wait_for_line(f"HTTP process {number} of {count} serves")

    def children(self, what: str) -> list[int]:
        """Process ids of its children that run a function of this module."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if what in Path(f"/proc/{pid}/cmdline").read_text()]

    def wait_for_children(self, what: str, count: int) -> list[int]:
        """Wait until so many of its children run a function of this module; return their process ids."""
        deadline = time.monotonic() + WAIT_S
        while len(pids := self.children(what)) < count:
            assert time.monotonic() < deadline, f"expected {count} children {what!r}, got {pids}"
            time.sleep(0.01)
        return pids

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for its end; return the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(WAIT_S)
        print(self.stderr)  # shown when a test fails
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in self.children(""):
                os.kill(pid, signal.SIGCONT)  # one that is suspended would stay behind
        self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Server(Program):
    """A server process.

    Args:
        executor: a function of lifecycle_executors.py.
        num_files: limit of open files; None = this process's.
        folders: variables of its environment that name folders, as TMPDIR; None = those of this process.
        setup: Python statements of the launcher.
        options: of the server.
    """

    def __init__(
        self,
        golden_dir: Path,
        executor: str,
        num_files: int | None = None,
        folders: Mapping[str, Path] | None = None,
        setup: str = "",
        **options: object,
    ) -> None:
        limit = [] if num_files is None else ["prlimit", f"--nofile={num_files}"]
        options = {"model": str(golden_dir / "qwen3-tiny"), "served_model_name": "toy", "port": 0, **options}
        argv = [
            *limit,
            sys.executable,
            "-c",
            f"{setup}\n{START_SCRIPT}",
            json.dumps(options),
            f"{_EXECUTORS}:{executor}",
        ]
        super().__init__(argv, **{name: str(folder) for name, folder in (folders or {}).items()})

    @property
    def url(self) -> str:
        """Where it serves; waits until it does."""
        return self.wait_for_line(r"serving toy on (http://\S+)")[1]


@contextlib.contextmanager
def serving(
    golden_dir: Path,
    executor: str = "create_slow",
    num_files: int | None = None,
    tmpdir: Path | None = None,
    setup: str = "",
    **options: object,
) -> Iterator[Server]:
    """A server process that is killed at the end, should it still run then."""
    folders = None if tmpdir is None else {"TMPDIR": tmpdir}
    with contextlib.closing(Server(golden_dir, executor, num_files, folders, setup, **options)) as server:
        yield server


class Stream:
    """A streaming completion over its own connection; constructed once its first chunk has arrived.

    `options` are fields of its body.
    """

    def __init__(self, url: str, max_tokens: int, **options: object) -> None:
        self._client = httpx.Client(timeout=WAIT_S)
        body = {"model": "toy", "prompt": [5, 6], "max_tokens": max_tokens, "stream": True, "temperature": 0, **options}
        self._response = self._client.send(
            self._client.build_request("POST", f"{url}/v1/completions", json=body), stream=True
        )
        assert self._response.status_code == 200, self._response.read()
        self._lines = (line for line in self._response.iter_lines() if line)
        self.events = [next(self._lines)]

    def read(self) -> list[str]:
        """Read to the end; return the data of all events."""
        self.events += self._lines
        self.close()
        return [event.removeprefix("data: ") for event in self.events]

    def close(self) -> None:
        """Disconnect."""
        self._response.close()
        self._client.close()


def complete(url: str, **options: object) -> httpx.Response:
    """The answer to a small request; `options` are fields of its body."""
    body = {"model": "toy", "prompt": [5, 6], "max_tokens": 3, "temperature": 0, **options}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)


def is_complete(events: list[str]) -> bool:
    """Whether a stream's events end as they should."""
    reasons = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    return events[-1] == "[DONE]" and reasons[-1] == "length"


def error_of(events: list[str]) -> dict[str, object]:
    """The error that a stream ended with."""
    assert events[-1] == "[DONE]"
    error: dict[str, object] = json.loads(events[-2])["error"]
    return error
