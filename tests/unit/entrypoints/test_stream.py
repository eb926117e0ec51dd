"""EventStream, until_disconnected and merge: whatever ends them, what they read from is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from fastdeploy_sd.entrypoints.openai.merging import QueueShare, merge
from fastdeploy_sd.errors import InternalError, Overloaded
from fastdeploy_sd.wire.http.error_format import json_pieces, to_json
from fastdeploy_sd.wire.http.event_stream import EventStream, until_disconnected


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
    with pytest.raises(ClientDisconnect):
        await until_disconnected(gone, anext(source.items))
    assert source.is_closed


async def test_work_that_is_done_wins() -> None:
    async def work() -> int:
        return 5

    assert await until_disconnected(connected, work()) == 5


WIDE = QueueShare(max_sequences=8, max_tokens=100)


def merged(sources: Sequence[Source], share: QueueShare = WIDE) -> AsyncGenerator[int, None]:
    return merge(lambda i: sources[i].items, [1] * len(sources), share)


@pytest.mark.parametrize("share", [WIDE, QueueShare(2, 100), QueueShare(1, 100), QueueShare(8, 2), QueueShare(8, 0)])
@pytest.mark.parametrize("count", [1, 3])
async def test_merging_yields_everything(count: int, share: QueueShare) -> None:
    sources = [Source() for _ in range(count)]
    for source in sources:
        source.go.set()
    assert sorted([i async for i in merged(sources, share)]) == [0] * count + [1] * count
    assert all(s.is_closed for s in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_a_merge_closes_its_sources(count: int) -> None:
    sources = [Source() for _ in range(count)]
    items = merged(sources)
    for _ in range(count):
        assert await anext(items) == 0
    await items.aclose()
    assert all(s.is_closed for s in sources)


async def test_one_error_closes_all_sources_and_is_raised_as_it_is() -> None:
    sources = [Source(), Source(InternalError("broken")), Source()]
    sources[1].go.set()
    with pytest.raises(InternalError, match="broken"):
        async for _ in merged(sources):
            pass
    assert all(s.is_closed for s in sources)


class Door:
    """Sources that a queue with so many places lets in, at most; the others are refused with Overloaded."""

    def __init__(self, num_places: int) -> None:
        self.num_free = num_places
        self.num_inside = self.max_inside = self.num_refused = 0

    async def source(self, index: int) -> AsyncGenerator[int, None]:
        if not self.num_free:
            self.num_refused += 1
            raise Overloaded("full")
        self.num_free -= 1
        self.num_inside += 1
        self.max_inside = max(self.max_inside, self.num_inside)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                yield index
        finally:
            self.num_free += 1
            self.num_inside -= 1


async def test_no_more_sources_run_than_the_share_allows() -> None:
    door = Door(5)
    items = [i async for i in merge(door.source, [1] * 40, QueueShare(5, 100))]
    assert sorted(items) == sorted([*range(40)] * 3)
    assert (door.max_inside, door.num_refused) == (5, 0)


async def test_what_finds_no_place_beside_its_siblings_comes_later() -> None:
    door = Door(2)
    items = [i async for i in merge(door.source, [1] * 20, QueueShare(16, 100))]
    assert sorted(items) == sorted([*range(20)] * 3)
    assert door.num_refused


async def test_a_job_of_which_nothing_finds_a_place_is_refused() -> None:
    with pytest.raises(Overloaded, match="full"):
        async for _ in merge(Door(0).source, [1] * 20, QueueShare(16, 100)):
            pass


async def test_a_job_that_has_begun_waits_until_others_leave_the_queue() -> None:
    door = Door(1)
    items = merge(door.source, [1, 1], QueueShare(1, 100))
    assert [await anext(items) for _ in range(3)] == [0, 0, 0]
    door.num_free -= 1  # another request is faster
    waiting = asyncio.ensure_future(anext(items))
    while door.num_refused < 2:
        await asyncio.sleep(0.01)
    door.num_free += 1
    assert await waiting == 1
    await items.aclose()


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        "x\u00e9",
        {"a": []},
        [[], {}, [1, [2]]],
        {"choices": [{"logprobs": {"content": [{"top": [{"b": 1}]}]}}]},
    ],
)
def test_json_in_pieces_is_the_same_json(value: object) -> None:
    for depth in range(7):
        assert "".join(json_pieces(value, depth)) == to_json(value)
