"""`bench attacks`: what others notice while a server handles bodies made to stall it.

Each body is sent while /health, one-token requests and a stream go on; told are the worst of their times, whether the
stream's bytes are those of an undisturbed one, and by how much any process of the server grew.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fastdeploy_sd.bench.attack_bodies import COMPLETION, Attack, large_attacks, small_attacks
from fastdeploy_sd.bench.latency import running_server
from fastdeploy_sd.errors import ConfigError

_MEGABYTE = 1_000_000
_SIZES = (2 * _MEGABYTE, (16 << 20) - 1024)
_PERIOD_S = 0.01
_TIMEOUT_S = 300
_NUM_UNDISTURBED = 20
_ONE_TOKEN = json.dumps({"prompt": "hello", "max_tokens": 1, "temperature": 0}).encode()
_STREAM = {"prompt": "def f(x):", "max_tokens": 100, "temperature": 0.8, "seed": 5, "ignore_eos": True, "stream": True,
           "request_id": "watched"}  # fmt: skip


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
    """Run the command and print the table.

    Raises:
        ConfigError: the options make no sense.
        Unavailable: the server does not start.
    """
    args, options = _parser().parse_known_args(argv)
    if args.repeats < 1:
        raise ConfigError(f"repeats: expected at least 1, got {args.repeats}", param="repeats")
    with running_server(options) as (address, processes):
        print("| Body | MB | Status | s | /health, worst ms | One token, ms lost | Growth, MB | / body | Streams |")
        print("|---|---|---|---|---|---|---|---|---|")
        bodies = [*small_attacks(), *(attack for size in _SIZES for attack in large_attacks(size))]
        for attack in bodies:
            rounds = [run_attack(address, processes["http"], attack) for _ in range(args.repeats)]
            print(_row(rounds), flush=True)
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
    with _Memory(pid) as memory, _repeating(_watches(address, figures, expected)):
        time.sleep(10 * _PERIOD_S)
        figures.status, milliseconds = _post(address, attack.path, attack.content)
        figures.seconds = milliseconds / 1000
        time.sleep(10 * _PERIOD_S)
    figures.growth_bytes = memory.growth_bytes
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


class _Memory:
    """Watches how much the processes of a server grow within a block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._base = {p: _status(p)[0] for p in _family(pid)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.growth_bytes = 0

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S / 2):
            with contextlib.suppress(OSError, ValueError, IndexError):  # one ends while it is looked at
                self._look()

    def _look(self) -> None:
        for pid in _family(self._pid):
            size, parent = _status(pid)
            base = self._base.setdefault(pid, self._base.get(parent, size))
            self.growth_bytes = max(self.growth_bytes, size - base)


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(descendant for child in children for descendant in _family(int(child)))]


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


def _row(rounds: Sequence[Figures]) -> str:
    """Medians over the rounds of each one's worst."""
    attack = rounds[0].attack
    growth = median(f.growth_bytes for f in rounds)
    cells = [
        attack.name,
        f"{len(attack.content) / _MEGABYTE:.2f}",
        str(rounds[0].status),
        f"{median(f.seconds for f in rounds):.2f}",
        f"{median(max(f.health_ms) for f in rounds):.0f}",
        f"{median(f.lost_ms for f in rounds):.0f}",
        f"{growth / _MEGABYTE:.0f}",
        f"{growth / len(attack.content):.1f}" if len(attack.content) >= _MEGABYTE else "",
        f"{sum(f.num_streams for f in rounds)} {'equal' if all(f.has_same_bytes for f in rounds) else 'DIFFERENT'}",
    ]
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench attacks",
        allow_abbrev=False,
        description="Start a server, send it bodies made to stall it, and measure what others notice.",
        epilog="All other options are the server's: --model demo, --num-threads 1, ...",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each body (default: %(default)s)")
    return parser
