"""The HTTP side of a server in a process, started and stopped by the launcher; signals are the launcher's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.config import Config, from_json, to_json
from fastdeploy_sd.engine.ipc.engine_process import engine_addresses
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.preparer import Preparer
from fastdeploy_sd.entrypoints.registration import route_gate
from fastdeploy_sd.errors import NotFound, Unavailable, shown
from fastdeploy_sd.metrics import RedisStats, SharedStats
from fastdeploy_sd.process.child import (
    EXIT_OK,
    ChildProcess,
    configure_logging,
    end_with_parent,
    leave_within,
    read_start,
)
from fastdeploy_sd.process.heap import settle_heap
from fastdeploy_sd.wire.channel import directory_of
from fastdeploy_sd.wire.http.connection import Connections
from fastdeploy_sd.wire.http.error_format import error_response
from fastdeploy_sd.wire.http.listeners import Listeners
from fastdeploy_sd.wire.http.service import serve_http

MONITORING_PATHS = ("/metrics", "/config-info", "/health", "/ping", "/live", "/ready")


class MonitoringOnly:
    """Passes requests for MONITORING_PATHS on to an application, and answers 404 to all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404 or pass the request on (ASGI)."""
        if scope["type"] != "http" or scope["path"] in MONITORING_PATHS:
            await self._app(scope, receive, send)
            return
        text = f"route: expected one of {', '.join(MONITORING_PATHS)} on metrics_port, got {shown(scope['path'])}"
        await error_response(NotFound(text, code="route_not_found"))(scope, receive, send)


logger = logging.getLogger(__name__)

_LEAVE_S = 3.0


class HttpServer:
    """The HTTP side of a process, with the processes that prepare its requests. Close it at the end.

    `client`: of the engines; may still be connecting. Raises ConfigError: as `Preparer` and `deployment_secret`.
    """

    def __init__(self, client: EngineGroup, config: Config, stats: SharedStats, instance_id: str) -> None:
        self._client = client
        self._stats = stats
        self._shared = Connections(config.server, stats.own.http)
        self._preparer = Preparer(config, lambda: client.model_info)
        self._app = create_app(client, config, self._preparer, stats, route_gate(config, instance_id))

    def start(self) -> None:
        """Begin to load what serving needs, while the engine still loads its model."""
        self._preparer.start()

    def close(self) -> None:
        """End what was started; requests that are still being prepared are told so."""
        self._preparer.close()

    async def serve(self, listeners: Listeners) -> int:
        """Answer HTTP until the engines end, and a few seconds longer, so that readers still get complete answers.

        Returns:
            The exit status: 0 when the engines have ended first, as it should.
        """

        async def answered() -> None:
            await self._client.wait_answered()
            self.close()

        logger.info("%s", self._preparer.parsers)
        logger.info("%s", self._preparer.defaults)
        # What is loaded stays: a full collection must not take longer than a small body may.
        settle_heap()
        apps: list[ASGIApp] = [self._app, MonitoringOnly(self._app)]
        ended = self._client.wait_ended()
        publishing = asyncio.create_task(self._stats.keep_published())
        try:
            return await serve_http(apps, listeners, self._shared, ended, answered)
        finally:
            publishing.cancel()


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What the HTTP processes of one start of a server have in common."""

    config: Config
    address: str
    instance_id: str


def create_client(common: WorkerStart, stats: RedisStats) -> EngineGroup:
    """Return a client of the engines or, where instances share their requests, of all of them, which `stats` counts."""
    addresses = engine_addresses(common.config, common.address)
    if common.config.redis.is_shared:
        from fastdeploy_sd.cluster.redis.client import ClusterClient  # brings in the Redis client

        return ClusterClient(addresses, common.config, common.instance_id, stats)
    shares_experts = common.config.parallel.shares_experts
    return EngineGroup(addresses, common.config.engine_timeout_s, shares_experts=shares_experts)


def start_worker(common: WorkerStart, listeners: Listeners, number: int) -> ChildProcess:
    """Start HTTP process `number` on sockets that others may share; it ends, with status 0, after the engines."""
    start = {
        "config": to_json(common.config, with_secrets=True),
        "address": common.address,
        "instance_id": common.instance_id,
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
    stats = SharedStats(Path(directory_of(start["address"])), f"http-{start['number']}")
    common = WorkerStart(config, start["address"], start["instance_id"])
    client = create_client(common, stats.own.redis)
    http = HttpServer(client, config, stats, start["instance_id"])
    name = f"HTTP process {int(start['number']) + 1} of {config.server.workers}"
    return asyncio.run(_work(name, http, client, Listeners.from_start(start)))


async def _work(name: str, http: HttpServer, client: EngineGroup, listeners: Listeners) -> int:
    loop = asyncio.get_running_loop()
    end_with_parent(heard=lambda: loop.call_soon_threadsafe(client.begin_drain))
    try:
        with contextlib.closing(http):
            http.start()
            await client.connect()
            logger.info("%s serves", name)
            return await http.serve(listeners)
    except Unavailable:
        return EXIT_OK  # the engines ended before they greeted us, which is not for HTTP to report
    finally:
        await client.close()
        leave_within(_LEAVE_S, EXIT_OK)
