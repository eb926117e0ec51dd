"""The launcher: brings up the engine processes and HTTP, and takes them down in the right order. Knows no routes.

On another host than the first of `ips` there is neither: it starts this host's ranks, see distributed/node.py.

Stopping (SIGTERM, Ctrl-C, SIGHUP): the engines drain first while HTTP goes on: running requests finish, and new ones
are told 503; when the engines have ended, HTTP ends. The same order answers every pending request when the only engine
dies. Each of these ends has a deadline. An engine that hangs is killed. Of several engines, one that dies is started
again, and when that has failed too often, the server goes on with the others; a start fails with the first of them.

Exit status: 0 after a requested stop, 1 when a process failed, 2 when the configuration, the checkpoint or the address
is wrong (nothing has been served then).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdeploy_sd.cluster.registrar import Registrar
from fastdeploy_sd.cluster.server_engines import ServerEngines
from fastdeploy_sd.config import Config
from fastdeploy_sd.distributed.starting import new_expert_file, new_weights_file
from fastdeploy_sd.entrypoints.engine_pools import engine_pool, expert_bridge
from fastdeploy_sd.entrypoints.http_process import HttpServer, WorkerStart, create_engines, start_worker
from fastdeploy_sd.entrypoints.registration import make_registrar, new_instance_id, wait_answering
from fastdeploy_sd.entrypoints.worker_pool import WorkerPool
from fastdeploy_sd.errors import ConfigError
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

# A draining engine that is inside a step looks at its deadline after the step; beyond this it is stuck.
_STUCK_S = 30.0
_HURRY_S = 5.0  # the same after a second signal, which means that the operator does not want to wait
_HTTP_END_S = 10.0
_SCHEDULER_END_S = 5.0
_LEAVE_S = 3.0


def run(configs: Sequence[Config], executor: str = DEFAULT_EXECUTOR, expert_file: int | None = None) -> int:
    """Serve until a signal or a failure, which has its line on standard error; return the exit status.

    Args:
        configs: of each model; they have the options of HTTP in common.
        expert_file: descriptor of the memory over which engines share experts, with those of other servers too;
            None = it is made here, where experts are shared.
    """
    try:
        if configs[0].parallel.own_node() != 0:
            from fastdeploy_sd.distributed import node  # which other servers do not need

            return node.run(configs[0])
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    configure_logging("server")
    raise_descriptor_limit()
    try:
        with bound(configs[0].server) as listeners, contextlib.ExitStack() as stack:
            given = tuple(_sharing(config, stack) for config in configs)
            return asyncio.run(_Launcher(given, listeners).run(executor, expert_file))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG


def _sharing(config: Config, stack: contextlib.ExitStack) -> Config:
    """Return a model's configuration with memory over which its engines share weights, if it has none yet."""
    parallel = config.parallel
    if parallel.weights_file is not None:
        return config
    path = stack.enter_context(new_weights_file(config, parallel.num_local_engines))
    return replace(config, parallel=replace(parallel, weights_file=path))


class _Launcher:
    """One server's processes and the order of their ends."""

    def __init__(self, configs: tuple[Config, ...], listeners: Listeners) -> None:
        self._configs = configs
        self._config = configs[0]  # what concerns all models is the same in each
        self._num_engines = sum(config.parallel.num_local_engines for config in configs)
        self._listeners = listeners
        self._instance_id = new_instance_id()
        self._engines: WorkerPool
        self._num_signals = 0
        self._begin_drain: Callable[[], None] = lambda: None

    async def run(self, executor: str, expert_file: int | None) -> int:
        """Serve; return the exit status, with which this process ends soon, whatever its threads are doing."""
        if self._config.redis.is_shared:
            from fastdeploy_sd.cluster.redis.deployment import verify_deployment  # brings in the Redis client

            await verify_deployment(self._config)
        own_file = (
            new_expert_file(self._config.parallel) if expert_file is None else contextlib.nullcontext(expert_file)
        )
        with private_address() as address, own_file as file:
            self._engines = engine_pool(self._configs, address, executor, file, self._note_given_up)
            self._bridge = expert_bridge(self._config, file if expert_file is None else None, self._note_given_up)
            async with self._bridge.alongside(_LEAVE_S):
                running = asyncio.create_task(self._engines.run())
                stop_on_signals(self._stop)
                try:
                    status = await self._serve(WorkerStart(self._configs, address, self._instance_id), running)
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
        leave_within(_LEAVE_S, status)
        return status

    def _note_given_up(self) -> None:
        # Before all run, and where engines need one another, the others cannot go on without it.
        if not self._engines.replaces or self._config.parallel.shares_experts:
            self._engines.begin_drain()
            self._engines.signal(signal.SIGKILL)

    async def _serve(self, common: WorkerStart, running: asyncio.Task[int]) -> int:
        stats = SharedStats(Path(directory_of(common.address)), "http")
        engines = create_engines(common, stats.own.redis)
        engines.on_silence(self._engines.kill)
        engines.restore_pauses()
        has_workers = self._config.server.workers > 1
        try:
            # The tokenizer's errors show while the model still loads.
            with contextlib.closing(HttpServer(engines, common, stats)) as http:
                if not has_workers:
                    http.start()
                if not await self._is_loaded(engines, running):
                    await running
                    return self._status()
                self._listen()
                if has_workers:
                    serving, begin_drain = self._workers(common)
                else:
                    serving, begin_drain = http.serve(self._listeners), engines.begin_drain
                async with self._schedulers(common).alongside(_SCHEDULER_END_S) as scheduler:
                    return await self._until_end(
                        self._registered(engines, serving, begin_drain, scheduler.begin_drain), running
                    )
        finally:
            await engines.close()

    async def _is_loaded(self, engines: ServerEngines, running: asyncio.Task[int]) -> bool:
        """Wait until all engines have loaded their models; False: they have ended."""
        began = time.monotonic()
        connecting = asyncio.create_task(engines.connect(to_all=True))
        await asyncio.wait({connecting, running}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            return False
        if connecting.exception() is not None:
            return False
        self._engines.stable_s += time.monotonic() - began
        self._engines.replaces = self._num_engines > 1
        return True

    async def _registered(
        self, engines: ServerEngines, serving: Coroutine[Any, Any, int], *drains: Callable[[], None]
    ) -> int:
        """Serve; routers know of it meanwhile, and hear of its end when a drain begins, as the callables do."""
        registrar = make_registrar(self._configs, engines, self._listeners, self._instance_id)

        def begin() -> None:
            registrar.begin_leaving()
            engines.begin_drain()
            for drain in drains:
                drain()

        self._begin_drain = begin
        registering = asyncio.create_task(self._register(registrar))
        try:
            return await serving
        finally:
            registering.cancel()
            await registrar.leave()

    async def _register(self, registrar: Registrar) -> None:
        """Register as soon as HTTP answers, which processes of its own begin some time after they were started."""
        if self._config.server.workers > 1 and self._config.server.router:
            await wait_answering(self._listeners.api)
        registrar.start()

    def _stop(self) -> None:
        """On every signal: the first lets the engines drain, a second has them end at once, a third kills them.

        HTTP refuses new requests from the first one on, whatever state the engines are in. A suspended engine goes on.
        """
        self._num_signals += 1
        if self._num_signals == 1:
            logger.info("stopping: running requests may finish (%g s)", self._config.server.shutdown_timeout_s)
            self._begin_drain()
            self._engines.signal(signal.SIGTERM)  # first: who ends when it is told of the drain shall know of this
            self._engines.begin_drain()
            self._kill_after(self._config.server.shutdown_timeout_s + _STUCK_S)
        elif self._num_signals == 2:  # noqa: PLR2004 (the second one)
            logger.info("stopping: running requests end now")
            self._engines.signal(signal.SIGINT)
            self._kill_after(_HURRY_S)
        else:
            self._engines.signal(signal.SIGKILL)
        self._engines.signal(signal.SIGCONT)

    def _listen(self) -> None:
        self._listeners.listen(self._config.server)
        if self._listeners.metrics is not None:
            logger.info("metrics are at %s/metrics too", url_of(self._listeners.metrics))
        names = ", ".join(name for config in self._configs for name in config.model.served_names)
        logger.info("serving %s on %s", names, url_of(self._listeners.api))
        if self._config.splitwise.splitwise_role == "mixed":
            logger.info("try: %s", example_request(self._config.server, self._listeners.api))

    def _schedulers(self, common: WorkerStart) -> WorkerPool:
        """Return what takes part in the deployment, where there is one, until the engines have ended."""
        return WorkerPool(
            lambda model: self._start_scheduler(common, model),
            len(self._configs) if self._config.redis.is_shared else 0,
            give_up=lambda: None,  # requests of others go elsewhere
            kind="scheduler" if len(self._configs) == 1 else "scheduler {}",
        )

    def _start_scheduler(self, common: WorkerStart, model: int) -> ChildProcess:
        from fastdeploy_sd.cluster.redis.process import start_scheduler  # brings in the Redis client

        return start_scheduler(self._configs, model, common.address, common.instance_id)

    def _workers(self, common: WorkerStart) -> tuple[Coroutine[Any, Any, int], Callable[[], None]]:
        """Return what serves in processes of their own, and what tells them of a drain."""
        pool = WorkerPool(
            lambda number: start_worker(common, self._listeners, number),
            self._config.server.workers,
            give_up=self._stop,
        )
        return pool.run(), pool.begin_drain

    async def _until_end(self, serving: Coroutine[Any, Any, int], running: asyncio.Task[int]) -> int:
        """Wait for the engines' end and HTTP's; when HTTP fails, stop the engines."""
        http = asyncio.create_task(serving)
        await asyncio.wait({http, running}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() and http.result() != EXIT_OK:
            self._stop()
        elif not running.done():  # the engines have announced their end
            self._kill_after(_STUCK_S)
        await running
        status = self._status()
        if self._num_engines > 1:
            self._begin_drain()  # none of the engines will be started again
        self._listeners.close()
        # What runs at other instances may finish.
        timeout_s = _HTTP_END_S + self._config.server.shutdown_timeout_s * self._config.redis.is_shared
        try:
            http_status = await asyncio.wait_for(http, timeout_s)  # pending answers are still being sent
        except TimeoutError:
            logger.error("HTTP did not end within %g s after the engine", timeout_s)
            http_status = EXIT_FAILED
        return status or http_status

    def _kill_after(self, timeout_s: float) -> None:
        asyncio.get_running_loop().call_later(timeout_s, self._engines.signal, signal.SIGKILL)

    def _status(self) -> int:
        """Our exit status for the engines'; one that was given up before the others ended does not count."""
        if bridge_status := self._bridge.statuses.get(0):  # it has said what is wrong
            return EXIT_CONFIG if bridge_status == EXIT_CONFIG else EXIT_FAILED
        statuses, given_up = self._engines.statuses, self._engines.given_up
        kept = [status for number, status in statuses.items() if number not in given_up] or list(statuses.values())
        status = next(filter(None, kept), EXIT_OK)
        if status in (EXIT_OK, EXIT_CONFIG):
            return status  # the engine has said what is wrong
        if self._num_signals and -status in (signal.SIGTERM, signal.SIGINT):
            return EXIT_OK  # stopped while loading
        print(f"error: the engine process failed ({describe_exit(status)})", file=sys.stderr)
        return EXIT_FAILED
