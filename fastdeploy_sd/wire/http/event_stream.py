"""HTTP plumbing of generation: server-sent events or lines, and noticing at once that a client is gone.

Both are needed because a response that is still being computed sends nothing, so that a closed connection would only
show when the next chunk is written. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
# Media type of a stream -> what ends each event of it.
EVENT_ENDS: Mapping[str, bytes] = {EVENTS: b"\n\n", LINES: b"\n"}


async def until_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; ClientDisconnect: the client left first, and `work` was cancelled and has ended."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await _cancel(task, watcher)


class EventStream(Response):
    """A stream whose generators are closed the moment the client leaves, or when it ends.

    A slow client only delays its own generator: `send` waits while the buffer is full. `source`, which `events`
    read from, is closed even if these were never started.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        source: AsyncGenerator[Any, None],
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENTS,
    ) -> None:
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **(headers or {})}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            return
        finally:
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event.encode("utf-8"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait until the tasks have ended, so that what they held is released."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
