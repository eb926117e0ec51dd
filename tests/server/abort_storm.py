"""Clients that send a request and hang up, hundreds a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.server.split_deployment import family
from tests.server.toy_process import Program

# Storms until enough requests were begun and left: a busy machine lets clients leave before anything began.
MAX_STORMS = 20
_LONGEST_S = 0.1
_FIRST_BYTES_S = 1.0
# Of a program and its descendants, from one storm to the next; each connection or request kept would be far more.
_MAX_GROWTH_KB, _MAX_NEW_FILES = 24 * 1024, 200


async def storm(url: str, bodies: Sequence[Mapping[str, Any]], seed: int, num_at_once: int = 64) -> float:
    """Send these completions, each over its own connection, and hang up; return the seconds it took.

    Some hang up at once, some after a while, some when the answer has begun.
    """
    rng, at_once, begin = random.Random(seed), asyncio.Semaphore(num_at_once), time.monotonic()
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def visit(body: Mapping[str, Any]) -> None:
        async with at_once:
            reader, writer = await asyncio.open_connection(host, int(port))
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            if rng.random() < 0.3:
                with contextlib.suppress(TimeoutError, OSError):
                    await asyncio.wait_for(reader.read(100), _FIRST_BYTES_S)
            elif rng.random() < 0.7:
                await asyncio.sleep(rng.random() * _LONGEST_S)
            writer.transport.abort()

    await asyncio.gather(*map(visit, bodies))
    return time.monotonic() - begin


def possessions(program: Program) -> tuple[int, int]:
    """Resident KiB and open descriptors of a program and all its descendants."""
    resident_kb = num_files = 0
    for pid in family(program.process.pid):
        with contextlib.suppress(OSError):
            resident_kb += int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
            num_files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return resident_kb, num_files


def is_settled(has: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether no program's possessions grew from the storm before the last one to the last.

    What is kept of every request grows in every storm; buffers grow in the first ones,
    and in later ones on a busy machine.

    Args:
        has: after each storm, the possessions of each program.
    """
    if len(has) < 3:
        return False
    return all(
        late_kb - early_kb < _MAX_GROWTH_KB and late_files - early_files < _MAX_NEW_FILES
        for (early_kb, early_files), (late_kb, late_files) in zip(*has[-2:], strict=True)
    )
