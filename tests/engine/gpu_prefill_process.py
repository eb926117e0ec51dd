"""A prefill instance on a GPU in a process of its own; prints its address, then serves until its input ends.

Usage: python -m tests.engine.gpu_prefill_process MODEL NUM_RANKS; the library of kernels is that of $FDSD_CUDA_LIBRARY.

A step does not begin to compute before all that was given to be sent is gone: pages that left between steps only would
never go.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from fastdeploy_sd.cli.verify import EngineVariant, standard_methods
from fastdeploy_sd.cli.verify.runs import engine_config
from fastdeploy_sd.config import Config, ParallelConfig, SplitwiseConfig
from fastdeploy_sd.disaggregation.prefill_engine import PrefillEngine
from fastdeploy_sd.disaggregation.roles import open_engine
from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.types import SchedulerOutput, StepResult
from tests.engine.gpu import tiny_config

WAY = EngineVariant("splitwise", 3, 48, num_blocks=12, arrivals_per_step=2)


DEADLINE_S = 120.0


def config_of(
    role: Literal["prefill", "decode"],
    model: Path,
    num_ranks: int = 1,
    protocols: tuple[Literal["ipc", "tcp"], ...] = ("ipc", "tcp"),
) -> Config:
    """An instance with draft layers."""
    [mtp] = standard_methods(["mtp"], [2])
    splitwise = SplitwiseConfig(
        splitwise_role=role, cache_transfer_protocol=protocols, pd_host="127.0.0.1", pd_secret="a secret of tests"
    )
    config = replace(engine_config(tiny_config(model), WAY, mtp), splitwise=splitwise)
    return replace(config, parallel=ParallelConfig(tensor_parallel_size=num_ranks, rank_timeout_s=DEADLINE_S))


def send_before_steps(engine: PrefillEngine) -> None:
    """Let a step wait until what earlier ones gave to the connector is gone."""
    connector, executor = cast(KvConnector, engine._connector), engine._executor
    send, execute, num_given = connector.send, executor.execute, 0

    def count(transfer_id: str, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        nonlocal num_given
        num_given += len(block_ids)
        send(transfer_id, layer, first_block, block_ids)

    def wait(plan: SchedulerOutput) -> StepResult:
        deadline = time.monotonic() + DEADLINE_S
        while sum(way.num_pages for way in connector.stats().sent.values()) < num_given:
            assert time.monotonic() < deadline, "pages do not leave while a step is under way"
            time.sleep(0.001)
        return execute(plan)

    setattr(connector, "send", count)  # noqa: B010 (mypy takes methods for constants)
    setattr(executor, "execute", wait)  # noqa: B010


def main(model: str, num_ranks: str) -> None:
    config = config_of("prefill", Path(model), int(num_ranks))
    executor = create_executor(config)
    try:
        with open_engine(config, executor) as engine:
            assert isinstance(engine, PrefillEngine), "a prefill instance"
            send_before_steps(engine)
            print(engine.model_info.kv_address, flush=True)
            assert engine.arrival_fd is not None, "orders arrive"
            fds = [engine.arrival_fd, sys.stdin.fileno()]
            while sys.stdin.fileno() not in select.select(fds, [], [], 0 if engine.has_work() else 1.0)[0]:
                engine.step()
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
