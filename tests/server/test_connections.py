"""Connections of clients that are slow, many, silent or no clients at all; real processes and sockets."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.toy_process import WAIT_S, Server, serving

pytestmark = pytest.mark.slow

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"prompt": [5, 6], "max_tokens": 2, "temperature": 0}).encode()
ENDLESS = json.dumps({"prompt": [5, 6], "max_tokens": 4000, "temperature": 0}).encode()


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def drip(connection: socket.socket, data: bytes, pause_s: float) -> None:
    """Send piece by piece until everything is sent, or the server has had enough."""
    connection.settimeout(0)
    for i in range(len(data)):
        with contextlib.suppress(BlockingIOError):
            connection.recv(1, socket.MSG_PEEK)
            break  # an answer, or the end
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(data[i : i + 1])
        time.sleep(pause_s)
    connection.settimeout(WAIT_S)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    """The error of a raw answer that closes the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in head.lower()
    assert b"content-type: application/json" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(scope="module")
def impatient(golden_dir: Path) -> Iterator[Server]:
    """A server with the shortest timeouts, but long enough for a test that gets no processor for a second."""
    options: dict[str, Any] = {"timeout_headers": 1, "timeout_body": 1.5, "timeout_keep_alive": 4}
    with serving(golden_dir, max_body_bytes=1_000_000, **options) as server:
        yield server
        assert "Traceback" not in server.stderr


# ---- slow clients -------------------------------------------------------------------------------------------------


def test_a_connection_that_says_nothing_is_closed(impatient: Server) -> None:
    with connect(impatient) as connection:
        assert read_all(connection) == b""


def test_headers_that_do_not_end_are_408_however_steadily_they_come(impatient: Server) -> None:
    with connect(impatient) as connection:
        drip(connection, POST + b"X: " + b"x" * 1000, pause_s=0.05)
        assert "headers" in error_of(read_all(connection), 408)["message"]


def test_a_body_that_stops_is_408(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        assert "body" in error_of(read_all(connection), 408)["message"]


def test_a_body_that_drips_is_408(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        drip(connection, b" " * 1000, pause_s=0.05)
        assert "body" in error_of(read_all(connection), 408)["message"]


def test_a_body_that_takes_long_but_comes_steadily_is_read(impatient: Server) -> None:
    """Three times the timeout, at many times the least rate."""
    pieces = [b" " * 5_000] * 15 + [BODY]
    answer, longest_pause_s, end = b"", WAIT_S, time.monotonic() + WAIT_S
    # Once more where this process had to wait for a processor for longer than a client may.
    while not answer.startswith(b"HTTP/1.1 200 ") and longest_pause_s > 1 and time.monotonic() < end:
        with connect(impatient) as connection:
            head = f"Content-Length: {sum(map(len, pieces))}\r\nConnection: close\r\n\r\n"
            times = [time.monotonic()]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(POST + head.encode())
                for piece in pieces:
                    connection.sendall(piece)
                    times.append(time.monotonic())
                    time.sleep(0.3)
            answer, longest_pause_s = read_all(connection), max(b - a for a, b in itertools.pairwise(times))
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", [b"fffffffffffffffff", b"1000000000000000"])
def test_a_chunk_larger_than_any_body_is_refused_before_it_comes(impatient: Server, size: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n{")
        assert error_of(read_all(connection), 413)["code"] == "body_too_large"


def test_a_client_that_sends_several_times_the_limit_learns_why_it_is_refused(impatient: Server) -> None:
    """And not only that its connection was reset, which is what it sees where that is closed while it sends."""
    with connect(impatient) as connection:
        connection.sendall(POST + b"Content-Length: 7000000\r\n\r\n")
        connection.sendall(bytes(7_000_000))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_a_body_without_end_is_not_read_for_ever_behind_its_answer(impatient: Server, path: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(4000):
                connection.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
            pytest.fail("64 MB were read")


def test_an_idle_connection_is_closed_and_a_used_one_is_not(impatient: Server) -> None:
    with contextlib.closing(http.client.HTTPConnection(impatient.url.removeprefix("http://"))) as connection:
        connection.connect()
        kept = connection.sock
        for _ in range(3):
            connection.request("POST", "/v1/completions", BODY)
            assert connection.getresponse().read()
            time.sleep(1.2)  # longer than headers may take: between two requests another timeout counts
        assert connection.sock is kept
        assert read_all(kept) == b""


def test_a_running_request_is_not_hurried(golden_dir: Path) -> None:
    """The deadlines are about what the client sends, not about how long its answer takes."""
    with serving(golden_dir, timeout_headers=1, timeout_body=1, timeout_keep_alive=1) as server:
        body = json.dumps({"prompt": [5, 6], "max_tokens": 300, "temperature": 0}).encode()  # 3 s at least
        answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 300


# ---- no clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_what_is_no_http_is_400_in_json(impatient: Server, sent: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent)
        assert error_of(read_all(connection), 400)["type"] == "invalid_request_error"


def test_endless_headers_are_431(impatient: Server) -> None:
    with connect(impatient) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(POST + b"X: " + b"x" * 70_000)
        error_of(read_all(connection), 431)


def test_garbage_behind_a_request_that_runs_ends_the_connection_without_a_second_answer(impatient: Server) -> None:
    with connect(impatient) as connection:
        head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\nGARBAGE\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 1


# ---- many clients -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """A connection with a request in progress."""
    with connect(server) as connection:
        connection.sendall(POST + f"Content-Length: {len(ENDLESS)}\r\n\r\n".encode() + ENDLESS)
        deadline = time.monotonic() + WAIT_S
        while httpx.get(f"{server.url}/load", timeout=WAIT_S).json()["num_requests_running"] == 0:
            assert time.monotonic() < deadline
        yield


def test_beyond_the_limit_idle_connections_give_way(golden_dir: Path) -> None:
    with serving(golden_dir, max_connections=3) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(20)]
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        assert all(read_all(connection) == b"" for connection in idle[:17])


def test_beyond_the_limit_of_busy_connections_is_503(golden_dir: Path) -> None:
    with serving(golden_dir, max_connections=2) as server, busy(server), connect(server) as other:
        other.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        assert other.recv(65536).startswith(b"HTTP/1.1 100 ")  # the server has begun to read its request
        with connect(server) as refused:
            error = error_of(read_all(refused), 503)
        assert (error["type"], error["code"]) == ("service_unavailable_error", "too_many_connections")
        assert error["message"] == "connections: expected at most 2 (max_connections), got another one"


def test_beyond_the_limit_of_an_address_is_503(golden_dir: Path) -> None:
    with serving(golden_dir, host="0.0.0.0", max_connections_per_address=2) as server:
        port = int(server.url.rpartition(":")[2])
        kept = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as refused:
            assert "max_connections_per_address" in error_of(read_all(refused), 503)["message"]
        with socket.create_connection(("127.0.0.1", port), WAIT_S, ("127.0.0.2", 0)) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert read_all(other).startswith(b"HTTP/1.1 200 ")
        for connection in kept:
            connection.close()
        _wait_for_health(f"http://127.0.0.1:{port}")


def _wait_for_health(url: str) -> bool:
    deadline = time.monotonic() + WAIT_S
    while httpx.get(f"{url}/health", timeout=WAIT_S).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return True


def test_more_connections_than_descriptors_are_no_trouble(golden_dir: Path) -> None:
    with serving(golden_dir, num_files=80) as server, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(server))
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        assert server.stderr.count("the limit of open files (80) leaves room for") == 1
        assert " ERROR " not in server.stderr


def test_without_descriptors_new_connections_wait_and_the_log_says_so_once(golden_dir: Path) -> None:
    with serving(golden_dir) as server:
        assert _wait_for_health(server.url)
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(connect(server)) for _ in range(50)]
            server.wait_for_line("new connections wait, as none can be accepted: Too many open files")
            time.sleep(1.5)  # some more attempts
            assert server.stderr.count(" ERROR ") == 1
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
            waiting[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert read_all(waiting[-1]).startswith(b"HTTP/1.1 200 ")


def test_the_limit_of_open_files_is_raised(golden_dir: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with serving(golden_dir) as server:
        assert server.url
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == hard


# ---- answers ------------------------------------------------------------------------------------------------------


def test_head_token_and_end_of_a_short_stream_come_in_one_piece(impatient: Server) -> None:
    """A client that is woken for the head has its first token."""
    body = json.dumps({"prompt": [5, 6], "max_tokens": 1, "temperature": 0, "stream": True}).encode()
    with connect(impatient) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
