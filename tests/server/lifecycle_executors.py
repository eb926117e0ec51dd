"""Executors for whole servers over the toy model, for `launch.run` to find by name."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.distributed.executor import start_ranks
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import ModelInfo, SchedulerOutput
from tests.doubles import toy_ranks
from tests.doubles.toy_executor import ToyExecutor

# The vocabulary of the tokenizer of the tiny checkpoints.
INFO = ModelInfo("toy", 4096, 4096, (1,), 64, 1024)


def _info(config: Config) -> ModelInfo:
    return replace(INFO, fingerprint=f"toy in {config.model.dtype}")


def create_slow(config: Config) -> ToyExecutor:
    """Takes a while per step, so that requests are still running when a test acts on them."""
    return ToyExecutor(_info(config), before_step=lambda plan: time.sleep(0.01))


def create_slower(config: Config) -> ToyExecutor:
    """Takes so long per step that a test can begin many requests before any of them ends."""
    return ToyExecutor(_info(config), before_step=lambda plan: time.sleep(0.1))


def create_busy(config: Config) -> ToyExecutor:
    """Computes for some seconds in each step, as over a long prompt."""

    def compute(plan: SchedulerOutput) -> None:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            pass

    return ToyExecutor(INFO, before_step=compute)


def create_stuck(config: Config) -> ToyExecutor:
    """Never comes back from its first step."""
    return ToyExecutor(_info(config), before_step=lambda plan: time.sleep(1000))


def create_never(config: Config) -> ToyExecutor:
    """A model that does not finish loading."""
    print("loading", file=sys.stderr, flush=True)
    time.sleep(1000)
    raise AssertionError("not reached")


def create_misconfigured(config: Config) -> ToyExecutor:
    """Fails as a wrong checkpoint does."""
    raise ConfigError("model: expected a checkpoint with weights, got none")


def create_second_misconfigured(config: Config) -> ToyExecutor:
    """The second engine fails so while the first one loads."""
    return create_misconfigured(config) if config.parallel.local_data_parallel_id == 1 else create_never(config)


def create_once(config: Config, expert_file: int | None = None) -> ToyExecutor:
    """Each engine starts once only; it has no experts to share."""
    Path(tempfile.gettempdir(), f"started-{config.parallel.local_data_parallel_id}").touch(exist_ok=False)
    return create_slow(config)


def create_other_once(config: Config) -> ToyExecutor:
    """The engine of the model "other" starts once only."""
    if config.model.served_name == "other":
        Path(tempfile.gettempdir(), "started-other").touch(exist_ok=False)
    return create_slow(config)


def create_ranks(config: Config) -> Executor:
    """Four processes that compute the same; a hang is noticed soon."""
    return _ranks(config, "create_rank_worker")


def create_nodes(config: Config) -> Executor:
    """Ranks as configured, some of them on another host."""
    return start_ranks(config, toy_ranks.create_first, f"{toy_ranks.__name__}:create_rank_worker")


def create_misconfigured_ranks(config: Config) -> Executor:
    """The other ranks fail as a wrong checkpoint does."""
    return _ranks(config, "create_misconfigured")


def create_broken_ranks(config: Config) -> Executor:
    """The other ranks fail as a bug does."""
    return _ranks(config, "create_broken")


def _ranks(config: Config, rank_worker: str) -> Executor:
    config = replace(config, parallel=ParallelConfig(tensor_parallel_size=4, rank_timeout_s=2.0))
    return start_ranks(config, toy_ranks.create_first, f"{toy_ranks.__name__}:{rank_worker}")
