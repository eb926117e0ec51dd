"""Processes that are measured: a server of our own, and everything that a process has started."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fastdeploy_sd.errors import Unavailable

Address = tuple[str, int]

_REGISTER_S = 60.0
_STOP_S = 60


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[tuple[Address, dict[str, int]]]:
    """A server with these options, until the end of the block; yields its address and its processes by name.

    Raises:
        Unavailable: it does not start.
    """
    with _running("fastdeploy_sd.entrypoints.openai.api_server", options) as (address, pid):
        yield address, {"http": pid, "engine": family(pid)[1]}


@contextmanager
def running_router() -> Iterator[tuple[Address, int]]:
    """A router until the end of the block; yields its address and its process.

    Raises:
        Unavailable: it does not start.
    """
    with _running("fastdeploy_sd.cluster.router.launch", []) as (address, pid):
        yield address, pid


@contextmanager
def _running(module: str, options: Sequence[str]) -> Iterator[tuple[Address, int]]:
    """Run a module on a free port until the end of the block, once it has said its address."""
    command = [sys.executable, "-m", module, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r" on http://(\S+):(\d+)", line):
                break
        else:
            raise Unavailable(f"{module}: expected it to start, got\n{''.join(lines)}")
        yield (match[1], int(match[2])), process.pid
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_S)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def get(address: Address, path: str) -> str:
    """Return the answer to a GET.

    Raises:
        Unavailable: another status than 200.
    """
    connection = http.client.HTTPConnection(*address, timeout=_REGISTER_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise Unavailable(f"{path}: expected status 200, got {answer.status}: {text[:200]}")
    return text


def wait_for_instances(router: Address, count: int) -> None:
    """Wait until a router has so many instances to choose from.

    Raises:
        Unavailable: that takes too long.
    """
    deadline = time.monotonic() + _REGISTER_S
    while time.monotonic() < deadline:
        states = [instance["state"] for instance in json.loads(get(router, "/instances"))["instances"]]
        if states.count("available") == count:
            return
        time.sleep(0.05)
    raise Unavailable(f"router: expected {count} instances to register, got {states}")


def family(pid: int) -> list[int]:
    """Return a process and what it and those have started and is still there, parents first."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            children += map(int, path.read_text(encoding="ascii").split())
    return [pid, *(descendant for child in sorted(children) for descendant in family(child))]
