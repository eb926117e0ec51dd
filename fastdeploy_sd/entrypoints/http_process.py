"""The HTTP side of a server in a process, started and stopped by the launcher; signals are the launcher's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.server_engines import ServerEngines
from fastdeploy_sd.config import Config, ServerConfig, from_json, to_json
from fastdeploy_sd.engine.ipc.engine_process import engine_addresses
from fastdeploy_sd.entrypoints.openai.app import create_app
from fastdeploy_sd.entrypoints.openai.preparer import Preparer
from fastdeploy_sd.entrypoints.openai.served_models import ServedModel
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
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.channel import directory_of
from fastdeploy_sd.wire.http.connection import Connections
from fastdeploy_sd.wire.http.error_format import error_response
from fastdeploy_sd.wire.http.listeners import Listeners
from fastdeploy_sd.wire.http.service import serve_http

MONITORING_PATHS = ("/metrics", "/config-info", "/health", "/ping", "/live", "/ready")


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What the HTTP processes of one start of a server have in common; configs: one per model."""

    configs: tuple[Config, ...]
    address: str
    instance_id: str

    @property
    def server(self) -> ServerConfig:
        """The options of HTTP."""
        return self.configs[0].server


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

    `engines`: may still be connecting. Raises ConfigError: as `Preparer` and `deployment_secret`.
    """

    def __init__(self, engines: ServerEngines, common: WorkerStart, stats: SharedStats) -> None:
        self._engines = engines
        self._stats = stats
        self._shared = Connections(common.server, stats.own.http)
        self._models = [
            ServedModel(config, group, Preparer(config, functools.partial(_info_of, group)))
            for config, group in zip(common.configs, engines.groups, strict=True)
        ]
        self._app = create_app(self._models, stats, route_gate(common.configs, common.instance_id))

    def start(self) -> None:
        """Begin to load what serving needs, while the engines still load their models."""
        for model in self._models:
            model.preparer.start()

    def close(self) -> None:
        """End what was started; requests that are still being prepared are told so."""
        for model in self._models:
            model.preparer.close()

    async def serve(self, listeners: Listeners) -> int:
        """Answer HTTP until the engines end, and a few seconds longer, so that readers still get complete answers.

        Returns:
            The exit status: 0 when the engines have ended first, as it should.
        """

        async def answered() -> None:
            await self._engines.wait_answered()
            self.close()

        for model in self._models:
            place = f"{model.names[0]}: " if len(self._models) > 1 else ""
            logger.info("%s%s", place, model.preparer.parsers)
            logger.info("%s%s", place, model.preparer.defaults)
        # What is loaded stays: a full collection must not take longer than a small body may.
        settle_heap()
        apps: list[ASGIApp] = [self._app, MonitoringOnly(self._app)]
        ended = self._engines.wait_ended()
        publishing = asyncio.create_task(self._stats.keep_published())
        try:
            return await serve_http(apps, listeners, self._shared, ended, answered)
        finally:
            publishing.cancel()


def _info_of(group: EngineGroup) -> ModelInfo:
    return group.model_info


def create_engines(common: WorkerStart, stats: RedisStats) -> ServerEngines:
    """Return clients of the engines or, where instances share their requests, of all of them, which `stats` counts."""
    is_replaced = len(common.configs) > 1
    of_models = list(zip(engine_addresses(common.configs, common.address), common.configs, strict=True))
    if common.configs[0].redis.is_shared:
        from fastdeploy_sd.cluster.redis.client import ClusterClient  # brings in the Redis client
        from fastdeploy_sd.cluster.redis.deployment import model_server

        server = common.instance_id
        return ServerEngines(
            [
                ClusterClient(own, config, model_server(server, config), stats, is_replaced=is_replaced)
                for own, config in of_models
            ]
        )
    return ServerEngines(
        [
            EngineGroup(
                own,
                config.engine_timeout_s,
                shares_experts=config.parallel.shares_experts,
                is_replaced=is_replaced,
            )
            for own, config in of_models
        ]
    )


def start_worker(common: WorkerStart, listeners: Listeners, number: int) -> ChildProcess:
    """Start HTTP process `number` on sockets that others may share; it ends, with status 0, after the engines."""
    start = {
        "configs": json.dumps([to_json(config, with_secrets=True) for config in common.configs]),
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
    stats = SharedStats(Path(directory_of(start["address"])), f"http-{start['number']}")
    configs = tuple(map(from_json, json.loads(start["configs"])))
    common = WorkerStart(configs, start["address"], start["instance_id"])
    engines = create_engines(common, stats.own.redis)
    http = HttpServer(engines, common, stats)
    name = f"HTTP process {int(start['number']) + 1} of {common.server.workers}"
    return asyncio.run(_work(name, http, engines, Listeners.from_start(start)))


async def _work(name: str, http: HttpServer, engines: ServerEngines, listeners: Listeners) -> int:
    loop = asyncio.get_running_loop()
    end_with_parent(heard=lambda: loop.call_soon_threadsafe(engines.begin_drain))
    try:
        with contextlib.closing(http):
            http.start()
            await engines.connect()
            logger.info("%s serves", name)
            return await http.serve(listeners)
    except Unavailable:
        return EXIT_OK  # the engines ended before they greeted us, which is not for HTTP to report
    finally:
        await engines.close()
        leave_within(_LEAVE_S, EXIT_OK)
