"""Bodies that cost far more than their size seems to ask for, and what others notice while a server handles one.

Each of the bodies has once stalled a server, or would have.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.server.split_deployment import family

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_PERIOD_S = 0.01
_TIMEOUT_S = 300
_NUM_UNDISTURBED = 20
_ONE_TOKEN = json.dumps({"prompt": "hello", "max_tokens": 1, "temperature": 0}).encode()
_STREAM = {"prompt": "def f(x):", "max_tokens": 100, "temperature": 0.8, "seed": 5, "ignore_eos": True, "stream": True,
           "request_id": "watched", "speculation": {"enabled": False}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attack:
    """One request.

    Attributes:
        path: of the route.
        content: the body.
    """

    name: str
    path: str
    content: bytes


def small_attacks() -> Iterator[Attack]:
    """Yield bodies whose numbers multiply."""
    prompts = ["a"] * 1024
    yield _attack("1024 prompts x n 128", COMPLETION, {"prompt": prompts, "n": 128, "max_tokens": 1})
    words = ["x" * 976] * 256
    yield _attack("1024 prompts x 256 bad words", COMPLETION, {"prompt": prompts, "bad_words": words, "max_tokens": 1})
    words = ["x" * 900] * 256
    yield _attack("48 prompts x 256 bad words", COMPLETION, {"prompt": ["a"] * 48, "bad_words": words, "max_tokens": 1})
    yield _attack("600 prompts", COMPLETION, {"prompt": ["a"] * 600, "max_tokens": 1})
    yield _attack("n 128, 20 logprobs", COMPLETION, {"prompt": "a", "n": 128, "max_tokens": 64, "logprobs": 20})


def large_attacks(num_bytes: int) -> Iterator[Attack]:
    """Yield bodies of about so many bytes each."""
    yield Attack("messages [1,1,...]", CHAT, _filled(b'{"messages":[', b"1,", b"1]}", num_bytes))
    yield Attack("messages [[],[],...]", CHAT, _filled(b'{"messages":[', b"[],", b"[]]}", num_bytes))
    head, tail = b'{"messages":[{"role":"user","content":"', b'"}]}'
    yield Attack("control tokens in a message", CHAT, _filled(head, b"<|im_end|>", tail, num_bytes))
    yield Attack("an emoji and a long message", CHAT, _filled(head + "\U0001f600".encode(), b"a", tail, num_bytes))
    yield Attack("text ab ab ...", COMPLETION, _filled(b'{"prompt":"', b"ab ", b'"}', num_bytes))
    yield Attack("text aaaa...", COMPLETION, _filled(b'{"prompt":"', b"a", b'"}', num_bytes))
    yield Attack("token ids", COMPLETION, _filled(b'{"prompt":[', b"1234,", b"5]}", num_bytes))
    yield Attack("lists in lists", COMPLETION, _filled(b'{"prompt":', b"[", b"", num_bytes))
    fields = ",".join(f'"f{i:07}":1' for i in range(num_bytes // 13))
    yield Attack("unknown fields", COMPLETION, f"{{{fields}}}".encode())
    words = ["x" * (num_bytes // 260)] * 256
    yield _attack("long bad words", COMPLETION, {"prompt": "a", "bad_words": words, "max_tokens": 1})


def _attack(name: str, path: str, body: dict[str, Any]) -> Attack:
    return Attack(name, path, json.dumps(body).encode())


def _filled(head: bytes, part: bytes, tail: bytes, num_bytes: int) -> bytes:
    return head + part * ((num_bytes - len(head) - len(tail)) // len(part)) + tail


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
