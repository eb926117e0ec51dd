"""`bench latency`: what HTTP adds to the engine's own time, and what a streamed token costs the processes of a server.

Starts a server, because the processor time of its processes is part of the answer. The clients are bare sockets that do
next to nothing, so that they neither wait for nor take the processor from what is measured.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import Command, markdown_table, show
from benchmarks.processes import running_server
from fastdeploy_sd.errors import Unavailable

_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
_COMPLETIONS = "/v1/completions"
_END_OF_HEAD, _END_OF_STREAM = b"\r\n\r\n", b"\r\n0\r\n\r\n"
_NUM_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request of one token, in milliseconds.

    Attributes:
        total: from the first byte sent to the last byte of the answer.
        before: until the engine takes the request into a step. engine: until that step has its token.
        after: until the answer is here.
    """

    total: float
    before: float
    engine: float
    after: float


def main(argv: Sequence[str]) -> int:
    """Run the command and print the table."""
    command = Command(
        "latency",
        "Start a server and measure what HTTP adds to the time to the first token, and the processor time of a"
        " streamed token.",
        "the server's",
    )
    command.number("--num-requests", 300, "of one token")
    command.number("--clients", 32, "streams at once")
    command.number("--output-len", 200, "tokens of a stream")
    command.json()
    args = command.read(argv)
    with running_server(args.others) as (address, processes):
        first_token(address, _NUM_WARM_UP)
        cpu = [cpu_us(processes)]
        results = first_token_metrics(first_token(address, args.num_requests))
        cpu.append(cpu_us(processes))
        num_tokens = stream(address, args.clients, args.output_len)
        cpu.append(cpu_us(processes))
    for name in processes:
        results[f"{name} cpu per request, us"] = (cpu[1][name] - cpu[0][name]) / args.num_requests
        results[f"{name} cpu per streamed token, us"] = (cpu[2][name] - cpu[1][name]) / num_tokens
    show(args, results, latency_table(results))
    return 0


def first_token_metrics(samples: Sequence[FirstToken]) -> dict[str, float]:
    """Return the medians, and the least of what HTTP adds."""
    metrics = {f"{name}, ms": median(getattr(s, name) for s in samples) for name in FirstToken.__slots__}
    added = [s.total - s.engine for s in samples]
    return metrics | {"added by http, ms": median(added), "added by http at best, ms": min(added)}


def latency_table(metrics: Mapping[str, float]) -> str:
    """Return the metrics as a Markdown table."""
    head = ("First token of one client, and streams side by side", "")
    return markdown_table(head, ((name, f"{value:.2f}") for name, value in metrics.items()))


def first_token(address: tuple[str, int], num_requests: int) -> list[FirstToken]:
    """Send requests of one token, one after the other over one connection.

    Raises:
        Unavailable: one is refused.
    """
    request = _request({"prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "collect_metrics": True})
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [_one(connection, request) for _ in range(num_requests)]


def stream(address: tuple[str, int], num_clients: int, output_len: int) -> int:
    """Run as many streams side by side and read them to their ends; returns how many tokens that were.

    Raises:
        Unavailable: one ends early.
    """
    body = {"prompt": _PROMPT, "max_tokens": output_len, "temperature": 1, "ignore_eos": True, "stream": True}
    request = _request(body)
    last: dict[Any, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for _ in range(num_clients):
            opened = socket.create_connection(address)
            selector.register(opened, selectors.EVENT_READ)
            last[opened] = b""
            opened.sendall(request)
        while last:
            for key, _ in selector.select():
                connection: Any = key.fileobj
                received = connection.recv(1 << 16)
                last[connection] = (last[connection] + received)[-len(_END_OF_STREAM) :]
                if last[connection] == _END_OF_STREAM:
                    selector.unregister(connection)
                    connection.close()
                    del last[connection]
                elif not received:
                    raise Unavailable("stream: expected it to its end, got a closed connection")
    return num_clients * output_len


def _request(body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _one(connection: socket.socket, request: bytes) -> FirstToken:
    sent = time.time()
    connection.sendall(request)
    head, _, body = b"", b"", b""
    received = b""
    while _END_OF_HEAD not in received:
        received += _more(connection)
    head, _, body = received.partition(_END_OF_HEAD)
    length = re.search(rb"content-length: (\d+)", head.lower())
    if not head.startswith(b"HTTP/1.1 200") or length is None:
        raise Unavailable(f"request: expected status 200 with a length, got {head.decode(errors='replace')}")
    while len(body) < int(length[1]):
        body += _more(connection)
    done = time.time()
    times = json.loads(body)["choices"][0]["metrics"]
    scheduled, made = times["first_scheduled_time"], times["first_token_time"]
    return FirstToken(*(1e3 * t for t in (done - sent, scheduled - sent, made - scheduled, done - made)))


def _more(connection: socket.socket) -> bytes:
    received = connection.recv(1 << 16)
    if not received:
        raise Unavailable("request: expected an answer, got a closed connection")
    return received


def cpu_us(processes: Mapping[str, int]) -> dict[str, float]:
    """Return the processor time that the threads of each process have used."""
    return {
        name: sum(
            int(path.read_text(encoding="ascii").split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        / 1e3
        for name, pid in processes.items()
    }
