"""The scheduler process: a server's child that takes part in the deployment for a model's engines. Knows no HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.membership import instance_ids
from fastdeploy_sd.cluster.redis.consumer import RequestConsumer
from fastdeploy_sd.cluster.redis.deployment import model_server
from fastdeploy_sd.config import Config, from_json, to_json
from fastdeploy_sd.engine.ipc.engine_process import engine_addresses
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.metrics import SharedStats
from fastdeploy_sd.process.child import (
    EXIT_OK,
    ChildProcess,
    configure_logging,
    end_with_parent,
    leave_within,
    read_start,
)
from fastdeploy_sd.wire.channel import directory_of

_LEAVE_S = 3.0


def start_scheduler(configs: Sequence[Config], model: int, address: str, server: str) -> ChildProcess:
    """Start the process for the engines of one of a server's models. It ends, with status 0, after them."""
    start = {
        "config": to_json(configs[model], with_secrets=True),
        "addresses": json.dumps(engine_addresses(configs, address)[model]),
        "server": model_server(server, configs[model]),
        "is_replaced": str(len(configs) > 1),
    }
    return ChildProcess("fastdeploy_sd.cluster.redis.process:main", start, ignores_signals=True)


def main() -> int:
    """Entry point of the process. Signals do not stop it: while the engine drains, its outputs are wanted."""
    configure_logging("scheduler")
    start = read_start()
    config = from_json(start["config"])
    addresses, shares_experts = json.loads(start["addresses"]), config.parallel.shares_experts
    is_replaced = start["is_replaced"] == str(True)
    client = EngineGroup(addresses, config.engine_timeout_s, shares_experts=shares_experts, is_replaced=is_replaced)
    name = f"scheduler-{config.parallel.neighbours.engines_before}"
    stats = SharedStats(Path(directory_of(addresses[0])), name)
    return asyncio.run(_work(config, client, start["server"], stats))


async def _work(config: Config, client: EngineGroup, server: str, stats: SharedStats) -> int:
    loop = asyncio.get_running_loop()
    publishing = asyncio.create_task(stats.keep_published())
    drains: list[Callable[[], None]] = [client.begin_drain]

    def drain() -> None:
        for begin in drains:
            begin()

    end_with_parent(heard=lambda: loop.call_soon_threadsafe(drain))
    try:
        await client.connect()
        consumers = [
            RequestConsumer(name, engine, client, config, server, stats.own.redis)
            for engine, name in enumerate(instance_ids(secrets.token_hex(8), config.parallel.num_local_engines))
        ]
        drains += [consumer.begin_drain for consumer in consumers]
        async with asyncio.TaskGroup() as tasks:
            for consumer in consumers:
                tasks.create_task(consumer.run())
        return EXIT_OK
    except Unavailable:
        return EXIT_OK  # the engines ended before they greeted us, which is not for this process to report
    finally:
        publishing.cancel()
        await client.close()
        leave_within(_LEAVE_S, EXIT_OK)
