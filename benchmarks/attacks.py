"""`bench attacks`: what others notice while a server handles bodies made to stall it.

Each body is sent while /health, one-token requests and a stream go on; told are the worst of their times, whether the
stream's bytes are those of an undisturbed one, and by how much any process of the server grew.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.attack_bodies import COMPLETION, Attack, large_attacks, small_attacks
from benchmarks.command import Command, table_of
from benchmarks.processes import family, running_server
from benchmarks.progress import Progress

_MEGABYTE = 1_000_000
_SIZES = (2 * _MEGABYTE, (16 << 20) - 1024)
_PERIOD_S = 0.01
_TIMEOUT_S = 300
_NUM_UNDISTURBED = 20
_ONE_TOKEN = json.dumps({"prompt": "hello", "max_tokens": 1, "temperature": 0}).encode()
_STREAM = {"prompt": "def f(x):", "max_tokens": 100, "temperature": 0.8, "seed": 5, "ignore_eos": True, "stream": True,
           "request_id": "watched", "speculation": {"enabled": False}}  # fmt: skip


@dataclass(slots=True)
class Figures:
    """What an attack did to others.

    Attributes:
        status: of its answer. seconds: until then.
        health_ms, one_token_ms: every time that was taken meanwhile.
        usual_ms: median of a one-token request before.
        num_streams: streams that ended meanwhile. has_same_bytes: all of them were what they are undisturbed.
        growth_bytes: the most by which a process of the server grew; a forked one counts from its parent's size.
    """

    attack: Attack
    status: int = 0
    seconds: float = 0.0
    health_ms: list[float] = field(default_factory=list)
    one_token_ms: list[float] = field(default_factory=list)
    usual_ms: float = 0.0
    num_streams: int = 0
    has_same_bytes: bool = True
    growth_bytes: int = 0

    @property
    def lost_ms(self) -> float:
        """By how much the slowest one-token request was slower than usual."""
        return max(self.one_token_ms, default=0.0) - self.usual_ms


def main(argv: Sequence[str]) -> int:
    """Run the command and print the table."""
    command = Command(
        "attacks", "Start a server, send it bodies made to stall it, and measure what others notice.", "the server's"
    )
    command.number("--repeats", 3, "of each body")
    args = command.read(argv)
    bodies = [*small_attacks(), *(attack for size in _SIZES for attack in large_attacks(size))]
    progress, rounds = Progress(len(bodies), "attacks"), []
    with running_server(args.others) as (address, processes):
        for attack in bodies:
            rounds.append([run_attack(address, processes["http"], attack) for _ in range(args.repeats)])
            progress.advance(attack.name)
    print(table_of(rounds, _COLUMNS))
    return 0


def run_attack(address: tuple[str, int], pid: int, attack: Attack) -> Figures:
    """Send one attack, and watch what it does to others.

    Args:
        address: of the server.
        pid: its process, the root of all its processes.
    """
    figures = Figures(attack)
    expected = _stream(address)
    usual = [_post(address, COMPLETION, _ONE_TOKEN)[1] for _ in range(_NUM_UNDISTURBED)]
    figures.usual_ms = median(usual)
    with _repeating([*_watches(address, figures, expected), _growth_watch(pid, figures)]):
        time.sleep(10 * _PERIOD_S)
        figures.status, milliseconds = _post(address, attack.path, attack.content)
        figures.seconds = milliseconds / 1000
        time.sleep(10 * _PERIOD_S)
    return figures


def _watches(address: tuple[str, int], figures: Figures, expected: bytes) -> Iterable[Callable[[], None]]:
    def health() -> None:
        figures.health_ms.append(_get(address, "/health"))

    def one_token() -> None:
        figures.one_token_ms.append(_post(address, COMPLETION, _ONE_TOKEN)[1])

    def stream() -> None:
        figures.has_same_bytes &= _stream(address) == expected
        figures.num_streams += 1

    return health, one_token, stream


@contextlib.contextmanager
def _repeating(watches: Iterable[Callable[[], None]]) -> Iterator[None]:
    """Call each function again and again in a thread of its own, until the end of the block."""
    stop = threading.Event()

    def repeat(watch: Callable[[], None]) -> None:
        while not stop.is_set():
            watch()
            stop.wait(_PERIOD_S)

    threads = [threading.Thread(target=repeat, args=(watch,)) for watch in watches]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _growth_watch(pid: int, figures: Figures) -> Callable[[], None]:
    """What remembers by how much any of the processes below `pid` has grown since this call."""
    sizes = {p: _status(p)[0] for p in family(pid)}

    def look() -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # one ends while it is looked at
            for p in family(pid):
                size, parent = _status(p)
                base = sizes.setdefault(p, sizes.get(parent, size))
                figures.growth_bytes = max(figures.growth_bytes, size - base)

    return look


def _status(pid: int) -> tuple[int, int]:
    """Resident bytes and the parent of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(text.split("VmRSS:")[1].split()[0]) * 1024, int(text.split("PPid:")[1].split()[0])


def _get(address: tuple[str, int], path: str) -> float:
    """Return the time of an answer, in milliseconds."""
    return _request(address, "GET", path, None)[2]


def _post(address: tuple[str, int], path: str, content: bytes) -> tuple[int, float]:
    status, _, milliseconds = _request(address, "POST", path, content)
    return status, milliseconds


def _stream(address: tuple[str, int]) -> bytes:
    """Return the bytes of the watched stream, without the time it was made at."""
    _, content, _ = _request(address, "POST", COMPLETION, json.dumps(_STREAM).encode())
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n")]
    chunks = [json.loads(line) | {"created": 0} if line.startswith(b"{") else line.decode() for line in lines]
    return json.dumps(chunks).encode()


def _request(address: tuple[str, int], method: str, path: str, content: bytes | None) -> tuple[int, bytes, float]:
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, content)
        response = connection.getresponse()
        received = response.read()
    finally:
        connection.close()
    return response.status, received, 1000 * (time.perf_counter() - begin)


def _growth(rounds: Sequence[Figures]) -> str:
    """Bytes per byte of a large body."""
    num_bytes = len(rounds[0].attack.content)
    return f"{median(f.growth_bytes for f in rounds) / num_bytes:.1f}" if num_bytes >= _MEGABYTE else ""


# Of the rounds of a body: the median of each one's worst.
_COLUMNS: Mapping[str, str | Callable[[Sequence[Figures]], object]] = {
    "Body": "{0[0].attack.name}",
    "MB": lambda rounds: f"{len(rounds[0].attack.content) / _MEGABYTE:.2f}",
    "Status": "{0[0].status}",
    "s": lambda rounds: f"{median(f.seconds for f in rounds):.2f}",
    "/health, worst ms": lambda rounds: f"{median(max(f.health_ms) for f in rounds):.0f}",
    "One token, ms lost": lambda rounds: f"{median(f.lost_ms for f in rounds):.0f}",
    "Growth, MB": lambda rounds: f"{median(f.growth_bytes for f in rounds) / _MEGABYTE:.0f}",
    "/ body": _growth,
    "Streams": lambda rounds: (
        f"{sum(f.num_streams for f in rounds)} {'equal' if all(f.has_same_bytes for f in rounds) else 'DIFFERENT'}"
    ),
}
