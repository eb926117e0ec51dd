"""The engine as a child process: how it is started, and what it does from its first line to its exit status.

Knows no HTTP. The model's framework is imported only here, in the child, by the executor's module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from fastdeploy_sd.config import Config, ParallelConfig, from_json, to_json
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import Executor, ServingExecutor
from fastdeploy_sd.engine.ipc.engine_loop import EngineLoop
from fastdeploy_sd.engine.ipc.messages import max_frame_bytes
from fastdeploy_sd.errors import ConfigError, Unavailable
from fastdeploy_sd.process.child import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ChildProcess,
    configure_logging,
    end_with_parent,
    read_start,
)
from fastdeploy_sd.process.heap import settle_heap
from fastdeploy_sd.wire.channel import ServerChannel, directory_of, remove_directory

logger = logging.getLogger(__name__)

ExecutorFactory = Callable[..., Executor]
EngineFactory = Callable[[Config, Executor], AbstractContextManager[Engine]]

_LEAVE_S = 10.0
# Named by a string, as what an engine runs on is not its business.
_TAKE_SHARE = "fastdeploy_sd.device.engine_cores:take_share"
_ALONE = "fastdeploy_sd.engine.ipc.engine_process:open_alone"


def engine_addresses(configs: Sequence[Config], address: str) -> list[list[str]]:
    """Return the addresses of each model's engines, below the one that `private_address` gave the server."""
    counts = [config.parallel.num_local_engines for config in configs]
    if sum(counts) == 1:
        return [[address]]
    numbers = itertools.count()
    return [[f"{address}-{next(numbers)}" for _ in range(count)] for count in counts]


def engine_config(config: Config, number: int) -> Config:
    """Return the configuration of one of a model's engines, which says its number among those of all hosts."""
    if config.parallel.local_data_parallel_id is not None:
        return config
    return replace(
        config, parallel=replace(config.parallel, local_data_parallel_id=config.parallel.first_engine + number)
    )


def start_engine(
    config: Config, address: str, executor: str, engine: str = _ALONE, expert_file: int | None = None
) -> ChildProcess:
    """Start the engine process; it answers clients at the address once the model is loaded.

    It ends with status 0 after SIGTERM (its requests may finish within `shutdown_timeout_s`) or SIGINT (they end at
    once with an error), 2 when the configuration or the checkpoint is wrong (one line on standard error says what),
    and 1 when it broke. Two signals and not the same one twice, because a service manager that stops a server may well
    signal each of its processes, not only the launcher.

    Args:
        executor: "module:function" that makes the executor from the configuration, an `ExecutorFactory`; where engines
            share experts it gets `expert_file` by its name too.
        engine: as that, what makes an engine over the executor, an `EngineFactory`; by default it knows no other
            instance.
        expert_file: descriptor of the memory over which engines share experts; None = they do not.
    """
    # The secret between instances and nodes is the one that an engine may need; it gets none where it does not.
    secrets = config.splitwise.splitwise_role != "mixed" or config.parallel.num_nodes > 1
    start = {"config": to_json(config, with_secrets=secrets), "address": address}
    start |= {"executor": executor, "engine": engine}
    files = () if expert_file is None else (expert_file,)
    if expert_file is not None:
        start["expert_file"] = str(expert_file)
    return ChildProcess("fastdeploy_sd.engine.ipc.engine_process:main", start, files)


@contextmanager
def open_alone(config: Config, executor: Executor) -> Iterator[Engine]:
    """Make an engine that knows no other instance."""
    yield Engine(config, executor)


def main() -> int:
    start = read_start()
    executors: list[ServingExecutor] = []

    def begin_drain() -> None:  # also while a step runs
        for executor in executors:
            executor.begin_drain()

    end_with_parent(functools.partial(remove_directory, directory_of(start["address"])), begin_drain)
    try:
        config = from_json(start["config"])
        _begin(config.parallel)
        create_executor: ExecutorFactory = _find(start["executor"])
        open_engine: EngineFactory = _find(start["engine"])
        file = {"expert_file": int(start["expert_file"])} if "expert_file" in start else {}
        executor = create_executor(config, **file)
        executors += [executor] if isinstance(executor, ServingExecutor) else []
        try:
            with open_engine(config, executor) as engine:
                status = _serve(engine, config, start["address"])
            if status == EXIT_OK and isinstance(executor, ServingExecutor):
                # The other engines are draining too, as the whole server ends; a second signal ends this wait.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                with contextlib.suppress(KeyboardInterrupt):
                    executor.leave(config.server.shutdown_timeout_s + _LEAVE_S)
            return status
        finally:
            executor.shutdown()
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    except Unavailable as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except Exception:
        logger.exception("the engine could not start")
        return EXIT_FAILED


def _begin(parallel: ParallelConfig) -> None:
    """Take this engine's part of the processors, and begin its log."""
    count = parallel.engines_on_host
    if parallel.local_data_parallel_id is None or max(count, parallel.data_parallel_size) == 1:
        configure_logging("engine")
        return
    number = parallel.neighbours.engines_before + parallel.local_data_parallel_id
    try:
        cores = _find(_TAKE_SHARE)(parallel.place_on_host, count)
    except OSError as error:
        configure_logging(f"engine {number}")
        logger.warning("the engines' processors are not kept apart: %s", error)
        return
    configure_logging(f"engine {number}")
    logger.log(logging.WARNING if cores.is_shared else logging.INFO, "runs on %s", cores.describe())


def _find(place: str) -> Any:
    """Import "module:function"; what brings in a model's framework is named by a string only."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _serve(engine: Engine, config: Config, address: str) -> int:
    # What is loaded stays: a full collection between two steps must not walk through the framework's modules.
    settle_heap()
    # A frame that is too long, but not by far, is answered with what is wrong with it.
    channel = ServerChannel(address, max_message_bytes=2 * max_frame_bytes(engine.model_info))
    loop = EngineLoop(engine, channel, config.server.shutdown_timeout_s)
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    signal.signal(signal.SIGINT, lambda *_: loop.end_now())
    return loop.run()
