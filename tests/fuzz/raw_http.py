"""Fuzzes the server's HTTP with bytes: right requests in odd forms and pieces, damaged ones, and no requests at all.

    python -m tests.fuzz.raw_http [--url U] [--seed S] [--count N] [--forever] [--max-stall-ms M]

Exchange number i of a seed is always the same, so a finding is repeated with --seed S --first I --count 1. What comes
back must be whole responses below 500, whose errors have OpenAI's form; a right request must get its answer; and others
must be served as if nothing were.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import itertools
import json
import random
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.harness import ANSWER_TIMEOUT_S, Report, Watch, argument_parser, server_at

NUM_CLIENTS = 16
# Who is owed no answer waits no longer for one.
HURRY_TIMEOUT_S = 0.3
# A server for these tests has short timeouts too.
SERVER_OPTIONS: dict[str, Any] = {"timeout_headers": 2, "timeout_body": 2, "timeout_keep_alive": 1}
MAX_ERROR_BYTES = 4096
_BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}).encode()
_READ_ROUTES = ["/", "/health", "/ping", "/v1/models", "/version", "/load", "/nowhere", "/%2e%2e/x", "/health?a=b&c"]
_ODD_HEADERS = [
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 0x10",
    b"Content-Length: 99999999999999999999", b"Content-Length: 1\r\nContent-Length: 2", b"Content-Length: ",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: \x0bchunked",
    b"Connection: close", b"Connection: keep-alive, close", b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA", b"Expect: 100-continue",
    b"Expect: nothing", b"Host: y", b"Host:", b"Content-Encoding: br", b"Content-Encoding: identity", b"Origin: null",
    b"Origin: https://evil.example", b"Authorization: Bearer \xff\xfe", b"Authorization: Basic", b"X: \x00", b"X: \xe9",
    b"X : y", b": y", b"X", b" folded: y", b"X: a\r\n b", b"X: " + b"x" * 9000, b"X" * 9000 + b": y", b"X: a\rY: b",
    b"Content-Type: text/plain", b"Content-Type: multipart/form-data; boundary=x", b"Range: bytes=0-",
    b"X-Forwarded-For: " + b"1.2.3.4, " * 100,
]  # fmt: skip
_ODD_PIECES = [
    b"\x00",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b"\xff",
    b"\x80",
    b" ",
    b"\t",
    b":",
    b"HTTP/1.1",
    b"x" * 5000,
    b"%00",
]
_OPENINGS = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200, b"\x05\x01\x00",
    b"SSH-2.0-OpenSSH_9.6\r\n", b"GET /health\r\n\r\n", b"\r\n" * 50, b"GET " + b"/x" * 40_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"{\"prompt\": \"x\"}\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip
_SIZES = [b"0", b"1", b"-1", b"+1", b"0x5", b"FFFFFFFFFFFFFFFF", b"1" * 40, b"5;ext=1", b"5 ", b"", b"g", b"00000005"]


@dataclass(frozen=True)
class Exchange:
    """What one connection sends, and how.

    Attributes:
        kind: which of the ways it was made, for the report.
        pieces: sent one after the other, with a turn of the event loop between them.
        methods: of the requests that are owed an answer each; None = unknown.
        ending: "read" = until the server closes or nothing more comes; "close", "reset", "half": leave like that.
    """

    kind: str
    pieces: tuple[bytes, ...]
    methods: tuple[str, ...] | None = None
    ending: str = "read"


@dataclass
class ExchangeMaker:
    """Makes exchange `number` of a seed."""

    seed: int
    number: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/{self.number}")

    def make(self) -> Exchange:
        makers = [self._right, self._right, self._damaged, self._damaged, self._odd, self._odd, self._cut, self._chunks]
        return self._random.choice([*makers, self._opening])()

    def _right(self) -> Exchange:
        """One to four requests in a row, each owed an answer."""
        requests = [self._request() for _ in range(self._random.randint(1, 4))]
        data = b"".join(data for _, data in requests)
        return Exchange("right", self._split(data), tuple(method for method, _ in requests))

    def _damaged(self) -> Exchange:
        data = bytearray(b"".join(self._request(may_be_head=False)[1] for _ in range(self._random.randint(1, 2))))
        for _ in range(self._random.randint(1, 6)):
            at = self._random.randrange(len(data))
            match self._random.randrange(4):
                case 0:
                    data[at] = self._random.randrange(256)
                case 1:
                    del data[at : at + self._random.randint(1, 40)]
                case 2:
                    data[at:at] = self._random.choice(_ODD_PIECES)
                case _:
                    data[at:at] = data[at : at + self._random.randint(1, 200)]
            data = data or bytearray(b"\r\n")
        return Exchange("damaged", self._split(bytes(data)), ending=self._ending())

    def _odd(self) -> Exchange:
        headers = [b"Host: x", *self._random.sample(_ODD_HEADERS, self._random.randint(1, 4))]
        self._random.shuffle(headers)
        line = self._random.choice([b"POST /v1/completions", b"GET /health", b"POST /ping", b"PUT /x"]) + b" HTTP/1.1"
        data = b"\r\n".join([line, *headers, b"", self._random.choice([b"", b"hello", _BODY])])
        return Exchange("odd", self._split(data), ending=self._ending())

    def _cut(self) -> Exchange:
        data = self._request(may_be_head=False)[1]
        ending = self._random.choice(["close", "reset", "half"])
        return Exchange("cut", self._split(data[: self._random.randrange(len(data))]), ending=ending)

    def _chunks(self) -> Exchange:
        frames = [self._random.choice(_SIZES) + b"\r\n" + b"hello\r\n" for _ in range(self._random.randint(1, 5))]
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        end = self._random.choice(
            [b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"0\r\n" + b"T: x\r\n" * 5000 + b"\r\n", b""]
        )
        return Exchange("chunks", self._split(head + b"".join(frames) + end), ending=self._ending())

    def _opening(self) -> Exchange:
        data = self._random.choice([*_OPENINGS, self._random.randbytes(self._random.randint(1, 2000))])
        return Exchange("opening", self._split(data), ending=self._ending())

    def _request(self, may_be_head: bool = True) -> tuple[str, bytes]:
        """A right request and its method."""
        if self._random.random() < 0.5:
            target, body, method = "/v1/completions", self._body(), "POST"
        else:
            target, body = self._random.choice(_READ_ROUTES), b""
            method = self._random.choice(["GET", "HEAD"] if may_be_head else ["GET"])
        if self._random.random() < 0.2:
            target = f"http://x:1{target}"
        headers = [self._cased("Host: x")]
        if body and self._random.random() < 0.5:
            headers.append(self._cased("Transfer-Encoding: chunked"))
            body = self._chunked(body)
        elif body:
            headers.append(self._cased("Content-Length: ") + str(len(body)))
        headers += [f"X-{i}: {'y' * self._random.randrange(60)}" for i in range(self._random.choice([0, 0, 3, 30]))]
        self._random.shuffle(headers)
        return method, "\r\n".join([f"{method} {target} HTTP/1.1", *headers, "", ""]).encode() + body

    def _body(self) -> bytes:
        return self._random.choice([_BODY, b" " * 70_000 + _BODY, b"{", b"\xff\xfe", b"null", b'{"prompt": 5}'])

    def _cased(self, header: str) -> str:
        return self._random.choice([header, header.lower(), header.replace(": ", ":"), header.replace(": ", ":\t ")])

    def _chunked(self, body: bytes) -> bytes:
        framed = b""
        while body:
            size = self._random.choice([1, 7, 100, 50_000])
            piece, body = body[:size], body[size:]
            framed += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
            if len(framed) > 2000:  # small pieces are for small bodies
                size = 50_000
        return framed + b"0\r\n\r\n"

    def _split(self, data: bytes) -> tuple[bytes, ...]:
        if len(data) < 2 or self._random.random() < 0.4:
            return (data,)
        cuts = sorted(self._random.sample(range(1, len(data)), min(len(data) - 1, self._random.randint(0, 6))))
        return tuple(data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)]))

    def _ending(self) -> str:
        return self._random.choice(["read", "read", "read", "half", "close", "reset"])


def faults_of(exchange: Exchange, received: bytes, is_closed: bool) -> list[str]:
    """What is wrong with the bytes that came back; `is_closed`: by the server."""
    try:
        answers = list(_answers(received, exchange.methods))
    except (http.client.HTTPException, ValueError) as error:
        return [f"no HTTP: {error!r}"] if is_closed or exchange.methods is not None else []
    faults = [fault for status, body in answers if (fault := _fault_of(status, body))]
    if exchange.methods is not None and len(answers) != len(exchange.methods):
        faults.append(f"{len(answers)} answers to {len(exchange.methods)} requests")
    return faults


def _answers(received: bytes, methods: tuple[str, ...] | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield status and body of each response; the body is None where there is none to read."""
    stream = _Stream(received)
    for i in itertools.count():
        if stream.is_at_end:
            return
        method = methods[i] if methods is not None and i < len(methods) else "GET"
        response = http.client.HTTPResponse(stream, method=method)  # type: ignore[arg-type]
        response.begin()
        body = response.read()
        yield response.status, None if method == "HEAD" else body


class _Stream(io.BytesIO):
    """Received bytes as what http.client takes for a socket."""

    def makefile(self, mode: str) -> _Stream:
        return self

    def close(self) -> None:
        """Stay open: the next response follows."""

    @property
    def is_at_end(self) -> bool:
        return self.tell() == len(self.getvalue())


def _fault_of(status: int, body: bytes | None) -> str | None:
    if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return f"{status}: {body!r}"
    if status < http.HTTPStatus.BAD_REQUEST or body is None:
        return None
    try:
        error: Any = json.loads(body)["error"]
        is_right = set(error) == {"message", "type", "param", "code"} and len(body) <= MAX_ERROR_BYTES
    except (ValueError, KeyError, TypeError):
        is_right = False
    return None if is_right else f"{status} in another form: {body[:300]!r}"


async def exchange_with(host: str, port: int, exchange: Exchange) -> tuple[bytes, bool]:
    """Play an exchange; return what came back, and whether the server closed."""
    received = bytearray()
    is_closed = False
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(OSError):  # the server may close before everything is sent
            for piece in exchange.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if exchange.ending == "half":
                writer.write_eof()
        if exchange.ending in ("read", "half"):
            is_closed = await _read(reader, received, exchange)
    finally:
        if exchange.ending == "reset":
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):  # the server may have reset the connection first
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(received), is_closed


async def _read(reader: asyncio.StreamReader, received: bytearray, exchange: Exchange) -> bool:
    """Read what comes; return whether the server closed. Who is owed answers waits for them, others but a moment."""
    timeout_s = HURRY_TIMEOUT_S if exchange.methods is None else ANSWER_TIMEOUT_S
    try:
        while data := await asyncio.wait_for(reader.read(65536), timeout_s):
            received += data
            if exchange.methods is not None and _has_all(bytes(received), exchange.methods):
                return False
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def _has_all(received: bytes, methods: tuple[str, ...]) -> bool:
    with contextlib.suppress(http.client.HTTPException, ValueError):
        return len(list(_answers(received, methods))) == len(methods)
    return False


async def fuzz(url: str, seed: int, numbers: range, report: Report) -> None:
    """Play the exchanges with these numbers, some side by side, and judge them."""
    host, _, port = url.removeprefix("http://").partition(":")
    waiting = iter(numbers)

    async def play() -> None:
        for number in waiting:
            exchange = ExchangeMaker(seed, number).make()
            received, is_closed = await exchange_with(host, int(port), exchange)
            report.statuses[received[9:12].decode("latin-1") if received else "closed"] += 1
            for fault in faults_of(exchange, received, is_closed):
                report.add_finding(f"--seed {seed} --first {number} ({exchange.kind}, {exchange.ending}): {fault}")

    await asyncio.gather(*(play() for _ in range(NUM_CLIENTS)))


def main() -> int:
    """Run; return the exit status, 1 = findings."""
    arguments = argument_parser(__doc__ or "", count=2000).parse_args()
    flags = [part for name, value in SERVER_OPTIONS.items() for part in (f"--{name}", str(value))]
    with server_at(arguments.url, *flags) as url:
        for seed in itertools.count(arguments.seed):
            report = Report()
            numbers = range(arguments.first, arguments.first + arguments.count)
            with Watch(url, report):
                asyncio.run(fuzz(url, seed, numbers, report))
            report.verify_stall(arguments.max_stall_ms)
            print(f"seed {seed}: {report}", flush=True)
            if report.findings or not arguments.forever:
                return bool(report.findings)
    raise AssertionError("not reached")


if __name__ == "__main__":
    sys.exit(main())
