"""Ranks over the toy model: every one computes all of it, and checks that the others computed the same.

A request whose id starts with a word of `_fault` (or "refuse") makes something happen on rank 1 in its first step.
Factories for `start_ranks` to find by name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.interfaces.executor import WatchPrompts
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import ModelInfo, SchedulerOutput, StepResult
from fastdeploy_sd.worker.ranks.commands import Attempt, BeginDrafts, ForgetDrafts, RunRows, TakeOutput, TakePlan
from fastdeploy_sd.worker.ranks.coordinator import Collectives, GroupCoordinator
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from tests.doubles.toy_executor import ToyExecutor

COMPUTE_S = 3.0
# The vocabulary of the tokenizer of the tiny checkpoints.
INFO = ModelInfo("toy", 4096, 4096, (1,), 64, 1024)
_STEP_S = 0.005


class ToyFirst:
    """Rank 0: a toy executor that the other ranks follow."""

    def __init__(self, toy: ToyExecutor, lead: GroupCoordinator) -> None:
        self._toy, self._lead = toy, lead

    kv_pages: Any = None
    experts: None = None
    kv_identity: Any = None
    layer_signals: Any = None
    expert_monitor: Any = None
    adapters: Any = None

    @property
    def model_info(self) -> ModelInfo:
        return self._toy.model_info

    @property
    def block_store(self) -> None:
        return None

    grammars = block_store

    def watch_prompts(self, watch: WatchPrompts | None) -> None:
        raise AssertionError("a toy has no logits")

    def execute(self, plan: SchedulerOutput) -> StepResult:
        self._lead.take_plan(plan, ())
        with self._lead.attempt(RunRows):
            result = self._toy.execute(plan)
        self._lead.post(TakeOutput(result.verified.token_ids, result.verified.cu_num_output))
        return result

    def begin_drain(self) -> None:
        """No step waits for another engine."""

    def leave(self, timeout_s: float) -> None:
        """No other engine needs it."""

    def shutdown(self) -> None:
        self._toy.shutdown()


class ToyRankWorker:
    """Another rank.

    Args:
        before_step: called with each plan.
    """

    def __init__(
        self, toy: ToyExecutor, before_step: Callable[[SchedulerOutput], None], collectives: Collectives
    ) -> None:
        self._toy, self._before_step = toy, before_step
        self.collectives = collectives
        self._plan: SchedulerOutput | None = None
        self._result: StepResult | None = None

    def take(self, command: TakePlan | TakeOutput | BeginDrafts | ForgetDrafts) -> None:
        match command:
            case TakePlan(plan, _):
                assert not any(i.startswith("refuse") for i in plan.request_ids), "a plan that rank 1 does not take"
                self._plan = plan
            case TakeOutput(token_ids, _):
                assert self._result is not None
                assert token_ids.tolist() == self._result.verified.token_ids.tolist(), "another output than rank 0's"
            case _:
                raise AssertionError(f"the toy has no draft layers, and got {command}")

    def run(self, attempt: Attempt) -> None:
        assert self._plan is not None
        self._before_step(self._plan)
        self._result = self._toy.execute(self._plan)

    def drain(self) -> None:
        """Nothing is under way."""

    def leave(self, timeout_s: float) -> None:
        """No other engine needs it."""


def create_first(config: Config, group: RankGroup) -> ToyFirst:
    """Rank 0 of the toy ranks."""
    assert group.others is not None
    assert group.smallest(lambda: 10) == 10 - (group.size - 1)
    # Steps take so long that requests of the longest kind run whenever a test acts on them.
    toy = ToyExecutor(INFO, before_step=lambda plan: time.sleep(_STEP_S))
    return ToyFirst(toy, GroupCoordinator(group.others, group.collectives))


def create_rank_worker(config: Config, group: RankGroup) -> ToyRankWorker:
    """Another rank; rank r measures 10 - r."""
    assert group.smallest(lambda: 10 - group.rank) == 10 - (group.size - 1)
    fault = _fault if group.rank == 1 else lambda plan: None
    return ToyRankWorker(ToyExecutor(INFO), fault, group.collectives)


def _fault(plan: SchedulerOutput) -> None:
    for request_id in (new.request.request_id for new in plan.new):
        match request_id.split("-")[0]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "fail":
                raise RuntimeError("the toy broke")
            case "compute":
                end = time.monotonic() + COMPUTE_S
                while time.monotonic() < end:
                    pass


def create_misconfigured(config: Config, group: RankGroup) -> ToyRankWorker:
    """Fails as a wrong checkpoint does."""
    raise ConfigError("model: expected a checkpoint with weights, got none", param="model")


def create_misconfigured_beside_one_that_loads(config: Config, group: RankGroup) -> ToyRankWorker:
    """Rank 2 fails as a wrong checkpoint does, and rank 1 does not come to an end."""
    if group.rank == 1:
        time.sleep(1000)
    return create_misconfigured(config, group)


def create_broken(config: Config, group: RankGroup) -> ToyRankWorker:
    """Fails as a bug does."""
    raise RuntimeError("the toy cannot be loaded")


def create_broken_at_last(config: Config, group: RankGroup) -> ToyRankWorker:
    """Fails as a bug does, with memory for its KV, when rank 0 may have loaded already."""
    assert list(group.kv_files) == [group.rank]
    create_rank_worker(config, group)
    return create_broken(config, group)


def create_ending(config: Config, group: RankGroup) -> ToyRankWorker:
    """Ends without a word."""
    sys.stderr.flush()
    os._exit(7)
