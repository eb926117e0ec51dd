"""Serving HTTP in a process: uvicorn around the app, started and stopped by the launcher.

Knows neither routes nor the engine's process; signals are the launcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from fastdeploy_sd.config import Config, from_json, to_json
from fastdeploy_sd.entrypoints.acceptor import Acceptor
from fastdeploy_sd.entrypoints.connection import Connection, Connections
from fastdeploy_sd.entrypoints.listeners import Listeners
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.monitoring import MonitoringOnly
from fastdeploy_sd.entrypoints.openai.preparer import Preparer
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.ipc.channel import directory_of
from fastdeploy_sd.ipc.child import (
    EXIT_FAILED,
    EXIT_OK,
    ChildProcess,
    configure_logging,
    end_with_parent,
    leave_within,
    read_start,
)
from fastdeploy_sd.ipc.client import EngineClient
from fastdeploy_sd.metrics import SharedStats

# When the engine has ended, every answer is complete or an error; so long may slow readers take to fetch it.
_FLUSH_S = 5
_LEAVE_S = 3.0
_PUBLISH_S = 1.0


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: stopping has an order, which the launcher knows."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """The HTTP side of a process, with the processes that prepare its requests. Close it at the end.

    Args:
        client: of the engine; may still be connecting.
        config: what was started.
        stats: where this process counts.

    Raises:
        ConfigError: as `Preparer`.
    """

    def __init__(self, client: EngineClient, config: Config, stats: SharedStats) -> None:
        self._client = client
        self._stats = stats
        self._shared = Connections(config.server, stats.own)
        self._preparer = Preparer(config, lambda: client.model_info)
        self._app = create_app(client, config, self._preparer, stats)

    def start(self) -> None:
        """Begin to load what serving needs, while the engine still loads its model."""
        self._preparer.start()

    def close(self) -> None:
        """End what was started; requests that are still being prepared are told so."""
        self._preparer.close()

    async def serve(self, listeners: Listeners) -> int:
        """Answer HTTP on listening sockets, which are closed at the end, while the client's engine lives.

        Answers that are complete by then, if only with an error, still reach readers that fetch them within a few
        seconds.

        Returns:
            The exit status: 0 when the engine has ended first, as it should.
        """
        configs = [_uvicorn_config(self._app), _uvicorn_config(MonitoringOnly(self._app))]
        server = _Server(configs[0])
        acceptors = [
            Acceptor(listener, self._shared, functools.partial(Connection, self._shared, config, server.server_state))
            for listener, config in zip(listeners, configs, strict=False)
        ]

        async def stop_after_engine() -> None:
            await self._client.wait_ended()
            self.close()
            for acceptor in acceptors:
                acceptor.stop()
            listeners.close()
            server.should_exit = True

        for acceptor in acceptors:
            acceptor.start()
        tasks = [asyncio.create_task(stop_after_engine()), asyncio.create_task(self._publish())]
        try:
            await server.serve(sockets=[])  # the acceptors have them
        finally:
            for task in tasks:
                task.cancel()
        return EXIT_OK if server.should_exit else EXIT_FAILED

    async def _publish(self) -> None:
        while True:
            self._stats.publish()
            await asyncio.sleep(_PUBLISH_S)


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """Below errors uvicorn logs what clients do; which of that is worth a line is for us to say."""
    return uvicorn.Config(app, log_level="error", log_config=None, ws="none", timeout_graceful_shutdown=_FLUSH_S)


def start_worker(config: Config, address: str, engine_pid: int, listeners: Listeners, number: int) -> ChildProcess:
    """Start an HTTP process on listening sockets that others may share. It ends, with status 0, after the engine.

    Args:
        number: among them; that of its predecessor, if it has one.
    """
    start = {
        "config": to_json(config, with_secrets=True),
        "address": address,
        "engine_pid": str(engine_pid),
        **listeners.to_start(),
        "number": str(number),
    }
    function = "fastdeploy_sd.entrypoints.http_process:main"
    return ChildProcess(function, start, pass_fds=[listener.fileno() for listener in listeners], ignores_signals=True)


def main() -> int:
    """Entry point of an HTTP process. Signals do not stop it: while the engine drains, HTTP is needed."""
    configure_logging("http")
    start = read_start()
    config = from_json(start["config"])
    client = EngineClient(start["address"], int(start["engine_pid"]), config.server.engine_timeout_s)
    stats = SharedStats(Path(directory_of(start["address"])), int(start["number"]))
    return asyncio.run(_work(config, client, Listeners.from_start(start), stats))


async def _work(config: Config, client: EngineClient, listeners: Listeners, stats: SharedStats) -> int:
    loop = asyncio.get_running_loop()
    end_with_parent(heard=lambda: loop.call_soon_threadsafe(client.begin_drain))
    try:
        with contextlib.closing(HttpServer(client, config, stats)) as http:
            http.start()
            await client.connect()
            return await http.serve(listeners)
    except Unavailable:
        return EXIT_OK  # the engine ended before it greeted us, which is not for HTTP to report
    finally:
        await client.close()
        leave_within(_LEAVE_S, EXIT_OK)
