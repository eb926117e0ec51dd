"""A prefill instance on a GPU in a process of its own; prints its address, then serves until its input ends.

Usage: python -m tests.engine.gpu_prefill_process MODEL; the library of kernels is that of $FDSD_CUDA_LIBRARY.
"""

from __future__ import annotations

import select
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fastdeploy_sd.config import Config, SplitwiseConfig
from fastdeploy_sd.conformance import Way, standard_methods
from fastdeploy_sd.conformance.runs import engine_config
from fastdeploy_sd.handover.roles import open_engine
from fastdeploy_sd.ranks.executor import create_executor
from tests.engine.gpu import tiny_config

WAY = Way("splitwise", 3, 48, num_blocks=12, arrivals_per_step=2)


def config_of(role: Literal["prefill", "decode"], model: Path) -> Config:
    """An instance with draft layers that is reached over tcp alone."""
    [mtp] = standard_methods(["mtp"], [2])
    splitwise = SplitwiseConfig(
        splitwise_role=role, cache_transfer_protocol=("tcp",), pd_host="127.0.0.1", pd_secret="a secret of tests"
    )
    return replace(engine_config(tiny_config(model), WAY, mtp), splitwise=splitwise)


def main(model: str) -> None:
    config = config_of("prefill", Path(model))
    executor = create_executor(config)
    try:
        with open_engine(config, executor) as engine:
            print(engine.model_info.kv_address, flush=True)
            assert engine.arrival_fd is not None, "orders arrive"
            fds = [engine.arrival_fd, sys.stdin.fileno()]
            while sys.stdin.fileno() not in select.select(fds, [], [], 0 if engine.has_work() else 1.0)[0]:
                engine.step()
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
