"""Serving applications on listening sockets: uvicorn with our acceptors and connections. Knows no application.

Signals are the caller's: stopping has an order, which only it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from fastdeploy_sd.process.child import EXIT_FAILED, EXIT_OK
from fastdeploy_sd.wire.http.acceptor import Acceptor
from fastdeploy_sd.wire.http.connection import Connection, Connections
from fastdeploy_sd.wire.http.listeners import Listeners

# At the end every answer is complete or an error; so long may slow readers take to fetch it.
_FLUSH_S = 5


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    apps: Sequence[ASGIApp],
    listeners: Listeners,
    shared: Connections,
    ended: Coroutine[Any, Any, None],
    answered: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Answer HTTP on listening sockets, which are closed at the end, until `ended` returns; return the exit status.

    Then `answered` is waited for while requests that came before are answered. Answers that are complete by then, if
    only with an error, still reach readers that fetch them within a few seconds.
    """
    configs = [_uvicorn_config(app) for app in apps]
    server = _Server(configs[0])
    acceptors = [
        Acceptor(listener, shared, functools.partial(Connection, shared, config, server.server_state))
        for listener, config in zip(listeners, configs, strict=False)
    ]

    async def stop() -> None:
        await ended
        for acceptor in acceptors:
            acceptor.stop()
        listeners.close()
        if answered is not None:
            await answered()
        server.should_exit = True

    for acceptor in acceptors:
        acceptor.start()
    stopping = asyncio.create_task(stop())
    try:
        await server.serve(sockets=[])  # the acceptors have them
    finally:
        stopping.cancel()
    return EXIT_OK if server.should_exit else EXIT_FAILED


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """Below errors uvicorn logs what clients do; which of that is worth a line is for us to say."""
    return uvicorn.Config(app, log_level="error", log_config=None, ws="none", timeout_graceful_shutdown=_FLUSH_S)
