"""EventStream, until_disconnected and merge: whatever ends them, what they read from is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from fastdeploy_sd.entrypoints.openai.generation import merge
from fastdeploy_sd.entrypoints.openai.stream import ClientGoneError, EventStream, until_disconnected
from fastdeploy_sd.errors import Overloaded


class Source:
    """Counts up, waiting for `go` before every number after the first; knows when it has been closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self.is_closed = False
        self.items = self._count(error)

    async def _count(self, error: Exception | None) -> AsyncGenerator[int, None]:
        try:
            yield 0
            await self.go.wait()
            if error is not None:
                raise error
            yield 1
        finally:
            self.is_closed = True


async def events(source: AsyncGenerator[int, None]) -> AsyncGenerator[str, None]:
    async with aclosing(source):
        async for number in source:
            yield f"data: {number}\n\n"


async def connected() -> Any:
    await asyncio.Event().wait()


async def gone() -> Any:
    return {"type": "http.disconnect"}


async def test_a_stream_is_sent_whole() -> None:
    source, sent = Source(), []
    source.go.set()

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(events(source.items), source.items)({}, connected, send)
    assert sent[0]["status"] == 200
    assert not any(name == b"content-length" for name, _ in sent[0]["headers"])
    assert b"".join(m["body"] for m in sent[1:]) == b"data: 0\n\ndata: 1\n\n"
    assert [m["more_body"] for m in sent[1:]] == [True, True, False]
    assert source.is_closed


async def test_a_client_that_leaves_closes_the_source() -> None:
    source = Source()

    async def send(message: Any) -> None:
        pass

    await anext(source.items)
    await EventStream(events(source.items), source.items)({}, gone, send)
    assert source.is_closed


async def test_a_connection_that_fails_before_the_first_event_closes_a_source_already_begun() -> None:
    source = Source()
    assert await anext(source.items) == 0

    async def send(message: Any) -> None:
        raise OSError("connection reset")

    await EventStream(events(source.items), source.items)({}, connected, send)
    assert source.is_closed


async def test_work_ends_before_the_caller_learns_that_the_client_is_gone() -> None:
    source = Source()
    await anext(source.items)
    with pytest.raises(ClientGoneError):
        await until_disconnected(gone, anext(source.items))
    assert source.is_closed


async def test_work_that_is_done_wins() -> None:
    async def work() -> int:
        return 5

    assert await until_disconnected(connected, work()) == 5


@pytest.mark.parametrize("count", [1, 3])
async def test_merging_yields_everything(count: int) -> None:
    sources = [Source() for _ in range(count)]
    for source in sources:
        source.go.set()
    assert sorted([i async for i in merge([s.items for s in sources])]) == [0] * count + [1] * count
    assert all(s.is_closed for s in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_a_merge_closes_its_sources(count: int) -> None:
    sources = [Source() for _ in range(count)]
    merged = merge([s.items for s in sources])
    for _ in range(count):
        assert await anext(merged) == 0
    await merged.aclose()
    assert all(s.is_closed for s in sources)


async def test_one_error_closes_all_sources_and_is_raised_as_it_is() -> None:
    sources = [Source(), Source(Overloaded("full")), Source()]
    sources[1].go.set()
    with pytest.raises(Overloaded, match="full"):
        async for _ in merge([s.items for s in sources]):
            pass
    assert all(s.is_closed for s in sources)
