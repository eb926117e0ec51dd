"""The processes that compute, as pools: the engines of all models, and what shares experts with other commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.ipc.engine_process import engine_addresses, engine_config, start_engine
from fastdeploy_sd.entrypoints.worker_pool import WorkerPool
from fastdeploy_sd.process.child import ChildProcess

ENGINE = "fastdeploy_sd.disaggregation.roles:open_engine"


def engine_pool(
    configs: Sequence[Config], address: str, executor: str, expert_file: int | None, give_up: Callable[[], None]
) -> WorkerPool:
    """Return a pool of the engines of all models, which replaces none yet, as what cannot start is wrong."""
    starts = [
        (engine_config(config, number), engine_address)
        for config, addresses in zip(configs, engine_addresses(configs, address), strict=True)
        for number, engine_address in enumerate(addresses)
    ]

    def start(number: int) -> ChildProcess:
        config, engine_address = starts[number]
        return start_engine(config, engine_address, executor, ENGINE, expert_file)

    engines = WorkerPool(start, len(starts), give_up, kind="engine {}", ends_only_in_drain=True)
    engines.replaces = False
    return engines


def expert_bridge(config: Config, file: int | None, give_up: Callable[[], None]) -> WorkerPool:
    """Return what shares the experts in this memory with other commands; engines end without it."""

    def start(_: int) -> ChildProcess:
        from fastdeploy_sd.distributed.expert_process import start_bridge  # which most servers do not need

        return start_bridge(config, file or 0)

    count = int(file is not None and len(config.parallel.expert_places) > 1)
    pool = WorkerPool(start, count, give_up, kind="expert")
    pool.replaces = False
    return pool
