"""The launcher: brings up the engine process and HTTP, and takes them down in the right order. Knows no routes.

On another host than the first of `ips` there is neither: it starts this host's ranks, see distributed/node.py.

Stopping (SIGTERM, Ctrl-C, SIGHUP): the engine drains first while HTTP goes on: running requests finish, and new ones
are told 503; when the engine has ended, HTTP ends. The same order answers every pending request when the engine dies.
Each of these ends has a deadline. An engine that hangs is killed.

Exit status: 0 after a requested stop, 1 when a process failed, 2 when the configuration, the checkpoint or the address
is wrong (nothing has been served then).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from fastdeploy_sd.cluster.redis.deployment import verify_deployment
from fastdeploy_sd.cluster.redis.process import start_scheduler
from fastdeploy_sd.config import Config
from fastdeploy_sd.distributed import node
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.engine.ipc.engine_process import start_engine
from fastdeploy_sd.entrypoints.http_process import HttpServer, WorkerStart, create_client, start_worker
from fastdeploy_sd.entrypoints.registration import make_registrar, new_instance_id
from fastdeploy_sd.entrypoints.worker_pool import WorkerPool
from fastdeploy_sd.errors import ConfigError, Unavailable
from fastdeploy_sd.metrics import SharedStats
from fastdeploy_sd.process.child import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ChildProcess,
    configure_logging,
    describe_exit,
    leave_within,
    stop_on_signals,
)
from fastdeploy_sd.wire.channel import directory_of, private_address
from fastdeploy_sd.wire.http.acceptor import raise_descriptor_limit
from fastdeploy_sd.wire.http.listeners import Listeners, bound, example_request, url_of

logger = logging.getLogger(__name__)

DEFAULT_EXECUTOR = "fastdeploy_sd.distributed.executor:create_executor"
ENGINE = "fastdeploy_sd.disaggregation.roles:open_engine"

# A draining engine that is inside a step looks at its deadline after the step; beyond this it is stuck.
_STUCK_S = 30.0
_HURRY_S = 5.0  # the same after a second signal, which means that the operator does not want to wait
_HTTP_END_S = 10.0
_SCHEDULER_END_S = 5.0
_LEAVE_S = 3.0


def run(config: Config, executor: str = DEFAULT_EXECUTOR) -> int:
    """Serve until a signal or a failure, which has its line on standard error; return the exit status."""
    try:
        if config.parallel.own_node() != 0:
            return node.run(config)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    configure_logging("server")
    raise_descriptor_limit()
    try:
        with bound(config.server) as listeners:
            return asyncio.run(_Launcher(config, listeners).run(executor))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


class _Launcher:
    """One server's processes and the order of their ends."""

    def __init__(self, config: Config, listeners: Listeners) -> None:
        self._config = config
        self._listeners = listeners
        self._instance_id = new_instance_id()
        self._num_signals = 0
        self._begin_drain: Callable[[], None] = lambda: None

    async def run(self, executor: str) -> int:
        """Serve; return the exit status, with which this process ends soon, whatever its threads are doing."""
        if self._config.redis.is_shared:
            await verify_deployment(self._config)
        with (
            private_address() as address,
            contextlib.closing(start_engine(self._config, address, executor, ENGINE)) as engine,
        ):
            stop_on_signals(lambda: self._stop(engine))
            common = WorkerStart(self._config, address, engine.pid, self._instance_id)
            status = await self._serve(common, engine)
        leave_within(_LEAVE_S, status)
        return status

    async def _serve(self, common: WorkerStart, engine: ChildProcess) -> int:
        stats = SharedStats(Path(directory_of(common.address)), "http")
        client = create_client(common, stats.own.redis)
        client.on_silence = functools.partial(engine.signal, signal.SIGKILL)
        has_workers = self._config.server.workers > 1
        try:
            # The tokenizer's errors show while the model still loads.
            with contextlib.closing(HttpServer(client, self._config, stats, self._instance_id)) as http:
                if not has_workers:
                    http.start()
                try:
                    await client.connect()
                except Unavailable:
                    return self._status(await engine.wait())
                self._listen()
                if has_workers:
                    serving, begin_drain = self._workers(common, engine)
                else:
                    serving, begin_drain = http.serve(self._listeners), client.begin_drain
                async with self._sharing(common) as scheduler:
                    return await self._until_end(
                        self._registered(client, serving, begin_drain, scheduler.begin_drain), engine
                    )
        finally:
            await client.close()

    async def _registered(
        self, client: EngineClient, serving: Coroutine[Any, Any, int], *drains: Callable[[], None]
    ) -> int:
        """Serve; routers know of it meanwhile, and hear of its end when a drain begins, as the callables do."""
        registrar = make_registrar(self._config, client, self._listeners, self._instance_id)

        def begin() -> None:
            registrar.begin_leaving()
            client.begin_drain()
            for drain in drains:
                drain()

        self._begin_drain = begin
        registrar.start()
        try:
            return await serving
        finally:
            await registrar.leave()

    def _stop(self, engine: ChildProcess) -> None:
        """On every signal: the first lets the engine drain, a second has it end its requests at once, a third kills it.

        HTTP refuses new requests from the first one on, whatever state the engine is in. A suspended engine goes on.
        """
        self._num_signals += 1
        if self._num_signals == 1:
            logger.info("stopping: running requests may finish (%g s)", self._config.server.shutdown_timeout_s)
            self._begin_drain()
            engine.signal(signal.SIGTERM)
            self._kill_after(self._config.server.shutdown_timeout_s + _STUCK_S, engine)
        elif self._num_signals == 2:  # noqa: PLR2004 (the second one)
            logger.info("stopping: running requests end now")
            engine.signal(signal.SIGINT)
            self._kill_after(_HURRY_S, engine)
        else:
            engine.signal(signal.SIGKILL)
        engine.signal(signal.SIGCONT)

    def _listen(self) -> None:
        self._listeners.listen(self._config.server)
        if self._listeners.metrics is not None:
            logger.info("metrics are at %s/metrics too", url_of(self._listeners.metrics))
        names = ", ".join(self._config.model.served_names)
        logger.info("serving %s on %s", names, url_of(self._listeners.api))
        if self._config.splitwise.splitwise_role == "mixed":
            logger.info("try: %s", example_request(self._config.server, self._listeners.api))

    @contextlib.asynccontextmanager
    async def _sharing(self, common: WorkerStart) -> AsyncIterator[WorkerPool]:
        """Take part in the deployment, where there is one, until the engine has ended."""
        pool = WorkerPool(
            lambda _: start_scheduler(self._config, common.address, common.engine_pid, common.instance_id),
            int(self._config.redis.is_shared),
            give_up=lambda: None,  # requests of others go elsewhere
            kind="scheduler",
        )
        running = asyncio.create_task(pool.run())
        try:
            yield pool
            await asyncio.wait({running}, timeout=_SCHEDULER_END_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _workers(
        self, common: WorkerStart, engine: ChildProcess
    ) -> tuple[Coroutine[Any, Any, int], Callable[[], None]]:
        """Return what serves in processes of their own, and what tells them of a drain."""
        pool = WorkerPool(
            lambda number: start_worker(common, self._listeners, number),
            self._config.server.workers,
            give_up=lambda: self._stop(engine),
        )
        return pool.run(), pool.begin_drain

    async def _until_end(self, serving: Coroutine[Any, Any, int], engine: ChildProcess) -> int:
        """Wait for the engine's end and HTTP's; when HTTP fails, stop the engine."""
        http = asyncio.create_task(serving)
        engine_end = asyncio.create_task(engine.wait())
        await asyncio.wait({http, engine_end}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() and http.result() != EXIT_OK:
            self._stop(engine)
        elif not engine_end.done():  # it has announced its end
            self._kill_after(_STUCK_S, engine)
        status = self._status(await engine_end)
        self._listeners.close()
        # What runs at other instances may finish.
        timeout_s = _HTTP_END_S + self._config.server.shutdown_timeout_s * self._config.redis.is_shared
        try:
            http_status = await asyncio.wait_for(http, timeout_s)  # pending answers are still being sent
        except TimeoutError:
            logger.error("HTTP did not end within %g s after the engine", timeout_s)
            http_status = EXIT_FAILED
        return status or http_status

    def _kill_after(self, timeout_s: float, engine: ChildProcess) -> None:
        asyncio.get_running_loop().call_later(timeout_s, engine.signal, signal.SIGKILL)

    def _status(self, engine_status: int) -> int:
        """Our exit status for the engine's."""
        if engine_status in (EXIT_OK, EXIT_CONFIG):
            return engine_status  # the engine has said what is wrong
        if self._num_signals and -engine_status in (signal.SIGTERM, signal.SIGINT):
            return EXIT_OK  # stopped while loading
        print(f"error: the engine process failed ({describe_exit(engine_status)})", file=sys.stderr)
        return EXIT_FAILED
