"""Processes that are measured: a server of our own, and everything that a process has started."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fastdeploy_sd.errors import Unavailable

_STOP_S = 60


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[tuple[tuple[str, int], dict[str, int]]]:
    """A server with these options, until the end of the block; yields its address and its processes by name.

    Raises:
        Unavailable: it does not start.
    """
    with _running("fastdeploy_sd.entrypoints.openai.api_server", options) as (address, pid):
        yield address, {"http": pid, "engine": family(pid)[1]}


@contextmanager
def running_router() -> Iterator[tuple[tuple[str, int], int]]:
    """A router until the end of the block; yields its address and its process.

    Raises:
        Unavailable: it does not start.
    """
    with _running("fastdeploy_sd.router.launch", []) as (address, pid):
        yield address, pid


@contextmanager
def _running(module: str, options: Sequence[str]) -> Iterator[tuple[tuple[str, int], int]]:
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


def family(pid: int) -> list[int]:
    """Return a process and what it and those have started and is still there, parents first."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            children += map(int, path.read_text(encoding="ascii").split())
    return [pid, *(descendant for child in sorted(children) for descendant in family(child))]
