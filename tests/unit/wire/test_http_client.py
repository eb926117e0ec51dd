"""Asking servers that behave, that close, that stop in the middle and that talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fastdeploy_sd.wire.http_client import Ask, BrokenError, Exchange, HttpClient, Target

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n3\r\nyou\r\n0\r\n\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[Target]:
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1])


def answering(*answers: bytes) -> tuple[Talk, list[bytes]]:
    """A server that gives these answers per connection, then closes; and the heads it has got."""
    heads: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
        writer.close()

    return talk, heads


async def answer_of(client: HttpClient, target: Target) -> bytes:
    exchange = await client.ask(target, Ask("GET", "/x"))
    try:
        return await exchange.read_all(1000)
    finally:
        client.finish(target, exchange)


@pytest.mark.parametrize(
    ("answer", "body"), [(PLAIN, b"hi"), (CHUNKED, b"hiyou"), (b"HTTP/1.1 100\r\n\r\n" + PLAIN, b"hi")]
)
async def test_answers_are_read_whole_and_connections_used_again(answer: bytes, body: bytes) -> None:
    talk, heads = answering(*[answer] * 3)
    async with listening(talk) as target:
        client = HttpClient(5.0)
        for _ in range(3):
            assert await answer_of(client, target) == body
        client.close()
    assert len(heads) == 3
    assert heads[0].startswith(b"GET /x HTTP/1.1\r\n")
    assert f"host: {target}".encode() in heads[0].lower()


async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    talk, heads = answering(PLAIN)
    async with listening(talk) as target:
        client = HttpClient(5.0)
        for _ in range(3):
            assert await answer_of(client, target) == b"hi"
        client.close()
    assert len(heads) == 3


@pytest.mark.parametrize(
    "answer", [b"", PLAIN[:-1], CHUNKED[:-7], b"HTTP/1.1 200", b"\x80\x04N.\r\n\r\n", b"HTTP/1.1 999999 x\r\n\r\n"]
)
async def test_an_answer_that_ends_too_soon_or_is_none_is_broken(answer: bytes) -> None:
    talk, heads = answering(answer)
    async with listening(talk) as target:
        client = HttpClient(5.0)
        with pytest.raises(BrokenError, match=r"^the connection was closed before the answer was complete$"):
            await answer_of(client, target)
        client.close()
    assert len(heads) == 1  # a connection that is new is not tried twice


async def test_nobody_there_is_broken_too() -> None:
    async with listening(answering()[0]) as target:
        pass
    with pytest.raises(BrokenError, match="cannot be reached"):
        await HttpClient(5.0).ask(target, Ask("GET", "/"))
    with pytest.raises(BrokenError, match="cannot be reached"):
        await HttpClient(5.0).ask(Target("no such host.invalid", 1), Ask("GET", "/"))


async def test_an_exchange_is_aborted_from_outside_before_and_in_its_answer() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/begun" in head:
            writer.write(CHUNKED[:60])
        await reader.read()
        writer.close()

    async with listening(talk) as target:
        client = HttpClient(5.0)
        for path in ("/silent", "/begun"):
            exchanges: set[Exchange] = set()

            async def read(path: str = path, exchanges: set[Exchange] = exchanges) -> None:
                exchange = await client.ask(target, Ask("GET", path), exchanges)
                try:
                    await exchange.read_all(1000)
                finally:
                    client.finish(target, exchange, exchanges)

            task = asyncio.create_task(read())
            while not exchanges or (path == "/begun" and not next(iter(exchanges)).status):
                await asyncio.sleep(0.01)
            for exchange in list(exchanges):
                exchange.abort()
            with pytest.raises(BrokenError):
                await task
            assert not exchanges


async def test_a_cancelled_exchange_leaves_nothing_behind() -> None:
    gone = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    async with listening(talk) as target:
        exchanges: set[Exchange] = set()
        task = asyncio.create_task(HttpClient(5.0).ask(target, Ask("GET", "/"), exchanges))
        while not exchanges:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()
    assert not exchanges


async def test_more_than_enough_is_not_read() -> None:
    talk, _ = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 9_000_000)
    async with listening(talk) as target:
        client = HttpClient(5.0)
        exchange = await client.ask(target, Ask("GET", "/"))
        body = await exchange.read_all(1000)
        client.finish(target, exchange)
    assert 1000 < len(body) < 1_000_000


def test_places_are_read_and_written() -> None:
    for text in ("127.0.0.1:9000", "[::1]:9000", "router.example:80"):
        assert str(Target.parse(text)) == text
    assert Target.parse("[::1]:5") == Target("::1", 5)
